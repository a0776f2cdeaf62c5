"""Commands are parsed hundreds of times in one process here: the sources of their options are looked up once."""

import functools
import inspect

inspect.getsource = functools.cache(inspect.getsource)
