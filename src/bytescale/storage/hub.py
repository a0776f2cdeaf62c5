"""Models of the Hugging Face Hub by name (``OWNER/NAME``, ``OWNER/NAME@REVISION``), as folders of its cache here.

A folder there is named by the commit, so what a run writes down pins it. Weights are safetensors alone, and code that
comes with a model is not downloaded.
"""

from __future__ import annotations

import re

from bytescale.common.errors import ConfigError, typed_path

_MODEL_ID = re.compile(r"(?P<id>[A-Za-z0-9][\w.-]*/[\w.-]+)(@(?P<revision>[\w./-]+))?")
_FILES = ("*.json", "tokenizer.model", "merges.txt", "*.jinja")


def local_folder(model: str, *, weights: bool = True) -> str:
    """The folder of a model.

    Args:
        model: a folder, or the name of a model of the Hub. A folder that exists is never looked for on the Hub.
        weights: whether weights are downloaded, too; else the configuration and the tokenizer alone.

    Raises ``ConfigError`` if the Hub has no such model, does not give it to us, or cannot be reached.
    """
    named = _MODEL_ID.fullmatch(model)
    if named is None or typed_path(model).exists():
        return model
    from huggingface_hub import constants, errors, snapshot_download  # most commands need no Hub

    name, hub = named["id"], constants.ENDPOINT
    files = [*_FILES, *(["*.safetensors"] if weights else [])]
    try:
        return snapshot_download(name, revision=named["revision"], allow_patterns=files)
    except errors.GatedRepoError as error:
        cause = f"{name} is a gated model, and its owner has not given access to the token of this machine"
        fix = f"ask for access on {hub}/{name}, then run `hf auth login`"
        raise ConfigError(cause, so="its weights cannot be downloaded", fix=fix) from error
    except errors.RevisionNotFoundError as error:
        cause = f"{name} has no revision {named['revision']}"
        raise ConfigError(cause, fix="name a branch, a tag or a commit of it") from error
    except errors.RepositoryNotFoundError as error:
        cause = f"{model} is no folder here, and {hub} has no model {name} that may be read"
        raise ConfigError(cause, fix="correct the name; for a private model run `hf auth login`") from error
    except (errors.LocalEntryNotFoundError, errors.HfHubHTTPError, OSError) as error:
        first_line = str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
        cause = f"{model} is no folder here, and it cannot be downloaded from {hub} ({first_line})"
        fix = f"where there is a network, run `hf download {name} --local-dir FOLDER`, and name a copy of it instead"
        raise ConfigError(cause, so="there are no weights to begin with", fix=fix) from error
