"""What of a folder that somebody else has made is refused before anything of it is used. Free of torch.

A config.json says how large a model is and which code runs it. transformers takes much of that as it stands, so a wrong
number would end in an error of Python somewhere inside of it, or in a model that is never built.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bytescale.common.errors import ConfigError

_MOST = {
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers"), 4096),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "num_heads", "n_head", "head_dim"), 2**17),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "intermediate_size", "ffn_hidden_size", "n_inner"), 2**22),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok"), 2**16),
    "v_head_dim": 2**17,
    "vocab_size": 2**30,
    "num_labels": 2**20,
}
"""The sizes of a model, and how large each of them may be: far beyond all models that there are."""
_FROM_0 = ("_eps", "_epsilon", "_attn_scalar", "rope_theta", "initializer_range")
_OBJECTS = ("text_config", "quantization_config", "rope_scaling", "rope_parameters")
_UNUSED = ("_attn_implementation", "attn_implementation", "_experts_implementation", "experts_implementation")


def refuse_links_out(folder: Path, home: Path | None = None) -> None:
    """Raise ``ConfigError`` if ``folder`` or a file of it is a link out of ``home``, the folder that the user named.

    Such a folder could have any file of this machine copied into what is published. Folders of the Hub's cache are
    links by design: to the files beside them (``blobs``) of the same model.
    """
    home = (home or folder).resolve()
    roots = [home, home.parent.parent / "blobs"] if home.parent.name == "snapshots" else [home]
    for path in (folder, *sorted(folder.iterdir())) if folder.is_dir() else ():
        if path.is_symlink() and not any(Path(os.path.realpath(path)).is_relative_to(root) for root in roots):
            raise ConfigError(
                f"{path} is a link to {os.path.realpath(path)}, outside of its folder",
                so="a file that does not belong to the model could be read and copied",
                fix="put a copy of that file in the place of the link, if you trust it",
            )


def file_inside(folder: Path, name: object) -> Path:
    """A file of ``folder`` that one of its files names. Raises ``ConfigError`` for a name that leads out of it."""
    if isinstance(name, str) and name not in ("", ".", "..") and Path(name).name == name:
        return folder / name
    raise ConfigError(
        f"a file of {folder} names {name!r}, which is no file of that folder",
        so="something that does not belong to the model would be read",
        fix="download the model again",
    )


def checked_config(content: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the content of a config.json without what bytescale decides itself: which code computes attention.

    Raises ``ConfigError`` for sizes that no model has, numbers that are none, and code to be fetched.
    """
    for name in _OBJECTS:
        if not isinstance(content.get(name), dict | None):
            raise _wrong(where, name, content[name], "an object")
    named = content.get("architectures")
    if named is not None and not (isinstance(named, list) and named and all(isinstance(one, str) for one in named)):
        raise _wrong(where, "architectures", named, "a list of names")
    for name, value in _entries(content):
        if value is None and name != "rms_norm_eps":
            continue
        if name.endswith(_FROM_0) and not (isinstance(value, int | float) and value >= 0):
            raise _wrong(where, name, value, "a number from 0 on")
        if isinstance(value, float) and math.isnan(value):
            raise _wrong(where, name, value, "a number")
        if name in _MOST:
            least = 0 if "experts" in name else 1
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= _MOST[name]:
                raise _wrong(where, name, value, f"a whole number from {least} to {_MOST[name]}")
        if name in _UNUSED and isinstance(value, str) and "/" in value:
            raise ConfigError(
                f"{where} has {name} = {value!r}",
                so="code of somebody else would be downloaded and run",
                fix="take the line out: bytescale computes attention itself",
            )
    return _without_unused(content)


def _wrong(where: str, name: str, value: object, wanted: str) -> ConfigError:
    shown = repr(value)
    return ConfigError(
        f"{where} has {name} = {shown[:60] + ' ...' * (len(shown) > 60)}, which is not {wanted}",
        so="no model can be built from it",
        fix="use the config.json that belongs to the weights",
    )


def _entries(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """All values that are no lists and no objects, each with the key that it stands under."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _entries(inner, str(key))
    elif isinstance(value, list):
        for inner in value:
            yield from _entries(inner, name)
    else:
        yield name, value


def _without_unused(content: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _without_unused(value) if isinstance(value, dict) else value
        for key, value in content.items()
        if key not in _UNUSED
    }
