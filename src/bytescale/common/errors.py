"""The errors that a user can meet. Each message gives the cause, the value, the consequence and the remedy."""


class BytescaleError(Exception):
    """Base of every error that is the user's or the machine's, not ours: printed without a stack trace."""


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
    """A server or the planner of the remote loader is gone, silent or without room: starting again may help."""


class RankFailure(BytescaleError, RuntimeError):
    """A training rank died, or ranks no longer agree on what to run."""


class RanksRefused(RankFailure):
    """Every rank refused its input: the user has to change something, starting again would not help."""


def problem(what: str, *, so: str = "", fix: str = "") -> str:
    """One message in the house form: ``what`` is wrong (with its value), ``so`` what would happen, ``fix`` it how."""
    parts = [what, so, f"To fix: {fix}" if fix else ""]
    return " ".join(_sentence(part) for part in parts if part)


def _sentence(text: str) -> str:
    text = text[0].upper() + text[1:] if text[1:2].isspace() or text.split(" ")[0].isalpha() else text
    return text if text.endswith((".", "?", "!")) else text + "."
