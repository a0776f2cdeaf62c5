"""The errors that a user can meet. Each message gives the cause, the value, the consequence and the remedy."""

from bytescale.common.text import visible


class BytescaleError(Exception):
    """Base of all errors that the user or the machine causes. They are printed without a stack trace.

    ``BytescaleError(what, so=..., fix=...)`` says what is wrong, with the value; the consequence; and what the user has
    to do. ``what`` alone is the message as it is.
    """

    def __init__(self, what: str, *, so: str = "", fix: str = "") -> None:
        parts = [what, so, f"To fix: {fix}" if fix else ""]
        super().__init__(visible(" ".join(_sentence(part) for part in parts if part)) if so or fix else what)


class ConfigError(BytescaleError, ValueError):
    """A setting is wrong, or two settings contradict each other."""


class DataError(BytescaleError, ValueError):
    """A corpus, an index or a tokenizer cannot be read or does not fit the model."""


class PlanError(BytescaleError, ValueError):
    """A plan cannot be made for this batch on this cluster, or breaks one of the rules of ``plan.verify``."""


class CheckpointError(BytescaleError, RuntimeError):
    """A checkpoint is missing, incomplete or belongs to another model."""


class DiskFullError(BytescaleError, RuntimeError):
    """No space is left where a run writes."""


class LoaderFailure(BytescaleError, RuntimeError):
    """A server or the planner of the remote loader is gone, silent or out of memory. Starting again may help."""


class RankFailure(BytescaleError, RuntimeError):
    """A training rank died, or ranks no longer agree on what to run."""


class RanksRefused(RankFailure):
    """Every rank refused its input. The user has to change something: starting again would not help."""


class NonFiniteError(BytescaleError, ArithmeticError):
    """The loss or the gradients are not numbers. The update was not made."""


def _sentence(text: str) -> str:
    text = text[0].upper() + text[1:] if text[1:2].isspace() or text.split(" ")[0].isalpha() else text
    return text if text.endswith((".", "?", "!")) else text + "."
