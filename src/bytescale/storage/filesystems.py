"""Opens fsspec's file systems with time limits of our own. All their errors become an ``OSError`` that names the URL.

It is a ``PermissionError`` or a ``FileNotFoundError`` if trying again is hopeless, and else a plain one. A client tries
once or twice; ``storage.retry`` tries again, and logs that it does.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import fsspec

from bytescale.common.errors import ConfigError

Result = TypeVar("Result")

CONNECT_SECONDS = 5.0
READ_SECONDS = 20.0
"""A read fails after this many seconds without a byte."""

_PACKAGES = {
    **dict.fromkeys(("s3", "s3a"), "'bytescale[s3]'"), **dict.fromkeys(("http", "https"), "'bytescale[http]'"),
    "webhdfs": "'bytescale[webhdfs]'", "gs": "gcsfs", "gcs": "gcsfs", "abfs": "adlfs", "az": "adlfs",
    "hdfs": "pyarrow", "sftp": "paramiko",
}  # fmt: skip
_CREDENTIALS = {
    "s3": "AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or FSSPEC_S3_ANON=true for what is public; "
    "AWS_ENDPOINT_URL where the server is not Amazon's",
    "webhdfs": "webhdfs://USER@HOST:PORT/..., or FSSPEC_WEBHDFS='{\"token\": ...}'",
}
_HOPELESS_KINDS: dict[str, type[OSError]] = {  # errors of botocore by name, raised before the server has answered
    "NoCredentialsError": PermissionError,
    "PartialCredentialsError": PermissionError,
    "CredentialRetrievalError": PermissionError,
    "TokenRetrievalError": PermissionError,
    "UnauthorizedSSOTokenError": PermissionError,
    "SSOTokenLoadError": PermissionError,
    "ProfileNotFound": PermissionError,
    "ParamValidationError": FileNotFoundError,  # such as a name that no bucket can have
}
_KINDS: dict[type[OSError], int] = {  # the kinds of errors that are told apart, with their errno
    PermissionError: errno.EACCES,
    FileNotFoundError: errno.ENOENT,
    IsADirectoryError: errno.EISDIR,
    NotADirectoryError: errno.ENOTDIR,
    OSError: errno.EIO,
}
_NOT_THERE = "no such file or folder"
_SHOWN_CHARACTERS = 300


def protocol_of(url: str) -> str:
    """``s3`` of ``s3://bucket/key``, and of ``simplecache::s3://bucket/key``."""
    return url.partition("://")[0].rpartition("::")[2].lower()


def credentials_hint(url: str) -> str:
    """Return where a file system looks for credentials, as a text that follows "check the credentials"."""
    known = _CREDENTIALS.get(protocol_of(url).replace("s3a", "s3"))
    return f" ({known})" if known else " of its file system"


def open_filesystem(url: str) -> tuple[Any, str]:
    """Return fsspec's file system for ``url``, and the path of ``url`` in that file system.

    Raises:
        ConfigError: there is no such protocol, or a package or library that it needs is not installed.
        OSError: the file system cannot be reached. Only some file systems connect at once.
    """
    protocol = protocol_of(url)
    try:
        settings = _settings(protocol)
        system, path = fsspec.core.url_to_fs(url, **({protocol: settings} if settings else {}))
    except ImportError as error:
        raise ConfigError(
            f"data source {url!r} needs a package that is not installed ({error})",
            so="it cannot be read",
            fix=f"pip install {_PACKAGES[protocol]}" if protocol in _PACKAGES else "install the package that it names",
        ) from error
    except ValueError as error:
        raise ConfigError(
            f"data source {url!r} has no file system ({error})", fix="use a protocol that fsspec knows"
        ) from error
    except OSError as error:
        if "Unable to load lib" in str(error):  # pyarrow's message, which goes on with 70 lines of places it looked at
            raise ConfigError(
                f"data source {url!r} needs Hadoop's own client library ({_first_line(error)})",
                so="it cannot be read",
                fix="set JAVA_HOME, HADOOP_HOME (for lib/native/libhdfs.so) and CLASSPATH (to what "
                "`hadoop classpath --glob` prints); or use webhdfs://HOST:9870/..., which needs none of them",
            ) from error
        raise _as_os_error(error, url) from error
    except Exception as error:  # archives have exceptions of their own
        raise _as_os_error(error, url) from error
    if protocol == "webhdfs":
        _mend_session(system.session)
    if protocol in ("s3", "s3a"):
        system.retries = 1  # s3fs would try five times, and each try of its client has a limit of time
    return system, path


def guarded(url: str, action: Callable[[], Result]) -> Result:
    """Return ``action()``. Every error of the remote file system becomes an ``OSError`` that names ``url``."""
    try:
        return action()
    except Exception as error:  # aiohttp, botocore, requests and others have exceptions of their own
        raise _as_os_error(error, url) from error


def _settings(protocol: str) -> dict[str, Any]:
    """With what a file system is opened. fsspec's own configuration takes precedence."""
    ours: dict[str, dict[str, Any]] = {}
    if protocol in ("s3", "s3a"):
        retries = {"mode": "standard", "total_max_attempts": 2}
        patience = {"connect_timeout": CONNECT_SECONDS, "read_timeout": READ_SECONDS}
        ours = {"config_kwargs": {**patience, "retries": retries}}
    elif protocol in ("http", "https"):
        import aiohttp

        patience = {"sock_connect": CONNECT_SECONDS, "sock_read": READ_SECONDS}
        ours = {"client_kwargs": {"timeout": aiohttp.ClientTimeout(total=None, **patience)}}
    theirs: Mapping[str, Any] = fsspec.config.conf.get(protocol, {})
    return {name: {**values, **theirs.get(name, {})} for name, values in ours.items()}


def _mend_session(session: Any) -> None:
    """Correct two faults of fsspec's WebHDFS: it waits for ever, and takes a data node's error page for the file."""
    from requests.adapters import HTTPAdapter

    class PatientAdapter(HTTPAdapter):
        def send(self, request: Any, *args: Any, **options: Any) -> Any:
            options["timeout"] = options.get("timeout") or (CONNECT_SECONDS, READ_SECONDS)
            return super().send(request, *args, **options)

    if session.hooks["response"] == [_check_webhdfs_answer]:  # corrected before: keep its open connections
        return
    for prefix in ("http://", "https://"):
        session.mount(prefix, PatientAdapter())
    session.hooks["response"] = [_check_webhdfs_answer]


def _check_webhdfs_answer(response: Any, **_: Any) -> None:
    if response.status_code < 400:
        return
    try:
        remote = response.json()["RemoteException"]
        name, text = remote["exception"], remote["message"]
    except (ValueError, KeyError, TypeError):
        name, text = "", response.reason
    kind: type[OSError] = {401: PermissionError, 403: PermissionError, 404: FileNotFoundError}.get(
        response.status_code, OSError
    )
    if name in ("StandbyException", "RetriableException"):  # sent with 403 by a name node that does not serve for now
        kind = OSError
    raise kind(errno.EIO, f"{response.status_code} {name}: {text}" if name else f"{response.status_code} {text}")


def _as_os_error(error: Exception, url: str) -> OSError:
    """Return ``error`` as an ``OSError``. Its cause decides: fsspec reports every failing HTTP file as missing."""
    if type(error) in _KINDS and isinstance(error, OSError) and error.strerror and error.filename:
        return error
    cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
    status = _status(cause)
    known = _HOPELESS_KINDS.get(type(cause).__name__)
    is_guess = protocol_of(url).startswith("http") and cause is not error
    if known is not None:
        kind = known
    elif isinstance(error, PermissionError) or status in (401, 403):
        kind = PermissionError
    elif status in (404, 410) or (isinstance(error, FileNotFoundError) and not is_guess):
        kind = FileNotFoundError
    else:
        kind = next((kind for kind in _KINDS if isinstance(error, kind) and kind is not FileNotFoundError), OSError)
    return kind(_KINDS[kind], _reason(cause, url), url)


def _status(error: Exception) -> int | None:
    """The HTTP status in an error of aiohttp, requests or botocore, or None."""
    response = getattr(error, "response", None)
    if isinstance(response, Mapping):
        return response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    return getattr(error, "status", None) or getattr(response, "status_code", None)


def _reason(cause: Exception, url: str) -> str:
    text = (isinstance(cause, OSError) and cause.strerror) or _first_line(cause)
    if isinstance(cause, (FileNotFoundError, KeyError)) and text.strip("/'") in url:  # the text is only the path
        return _NOT_THERE
    is_plain = type(cause).__module__ == "builtins" and isinstance(cause, OSError)
    return (text if is_plain and text else f"{type(cause).__name__}: {text}")[:_SHOWN_CHARACTERS]


def _first_line(error: Exception) -> str:
    return " ".join(str(error).split("\n")[:2]) if str(error) else ""
