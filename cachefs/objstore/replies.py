"""One mapping from what a store answers to the errors of :mod:`cachefs.errors`. Pure.

Backends reduce every failure to a :class:`Refusal` (an HTTP status, an S3 error code, or neither) and raise what
:func:`error_for` makes of it, so that the same situation is the same error whichever backend serves.

Codes: https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html
"""

from __future__ import annotations

import errno
import re
from dataclasses import dataclass

from ..errors import (
    Changed,
    ClockSkewed,
    Corrupt,
    Denied,
    NotFound,
    PreconditionFailed,
    Stalled,
    StoreError,
    Throttled,
    Unavailable,
)
from ..redaction import redact

# Errors of a disk that will be the same in a second.
_HOPELESS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ENAMETOOLONG, errno.EINVAL, errno.ENOTSUP})

_CREDENTIAL_HINTS = {
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS",
    "az": "set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN",
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
}

_CLOCK = frozenset({"RequestTimeTooSkewed", "RequestExpired", "RequestInTheFuture"})
_EXPIRED = frozenset({"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "InvalidToken"})
_ERROR_BYTES = 4096
_EXPIRED_HINT = "renew the session token, or where it comes from: the environment, the profile's file or its process"
_THROTTLED = frozenset({"SlowDown", "Throttling", "ThrottlingException", "RequestLimitExceeded", "TooManyRequests"})
_BAD_KEYS = {
    "InvalidAccessKeyId": "the store does not know the access key",
    "SignatureDoesNotMatch": "the secret access key does not fit the access key",
}
_ELSEWHERE = frozenset(
    {"PermanentRedirect", "TemporaryRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException"}
)
_RIGHTS = {
    "head": "the right to read (s3:GetObject)",
    "get": "the right to read (s3:GetObject)",
    "list": "the right to list (s3:ListBucket)",
    "put": "the right to write (s3:PutObject)",
    "delete": "the right to delete (s3:DeleteObject)",
}


class CredentialsRefused(Denied):
    """The store does not accept the keys as such. The retry layer looks for others and tries again with those."""


class CredentialsExpired(CredentialsRefused):
    """The credentials were good and are no more."""


@dataclass(frozen=True)
class Refusal:
    """A failed request, as far as the backend can tell. ``detail`` is one short line in the store's own words.

    ``cut``: the connection failed; ``stalled``: it went quiet; ``garbled``: the reply is not what was asked for.
    """

    status: int | None = None
    code: str | None = None
    detail: str = ""
    cut: bool = False
    stalled: bool = False
    garbled: bool = False


def refusal_of_os_error(error: OSError) -> Refusal:
    """What the error of a system call, or of a library that raises Python's own classes, stands for."""
    if isinstance(error, FileNotFoundError | IsADirectoryError | NotADirectoryError):
        return Refusal(404, None, str(error))
    if isinstance(error, PermissionError):
        return Refusal(403, None, str(error))
    if isinstance(error, FileExistsError):
        return Refusal(412, None, str(error))
    if isinstance(error, TimeoutError):
        return Refusal(stalled=True, detail=str(error))
    if error.errno in _HOPELESS:
        return Refusal(400, errno.errorcode.get(error.errno or 0), error.strerror or str(error))
    return Refusal(cut=True, detail=error.strerror or str(error))


def refusal_without_tag(body: memoryview) -> Refusal:
    """What a success of an S3 store without an ETag stands for: often an error in the body of a 200."""
    text = bytes(body[:_ERROR_BYTES]).decode("utf-8", "replace")
    code = re.search(r"<Code>\s*([A-Za-z0-9_.]+)\s*</Code>", text) if text.lstrip().startswith("<") else None
    if code is None:
        return Refusal(garbled=True, detail="a success without an ETag")
    return Refusal(500, code[1], "an error in a reply of status 200")


def credential_hint(url: str) -> str:
    """The way out for somebody whose credentials are missing or wrong."""
    scheme = url.partition("://")[0]
    return f"{_CREDENTIAL_HINTS.get(scheme, _CREDENTIAL_HINTS['s3'])}; NEARFLASH_ANONYMOUS=1 for a public bucket"


def error_for(refusal: Refusal, doing: str, *, url: str, bound: bool = False) -> StoreError:
    """The error to raise for a request that was ``doing`` one of ``head, get, list, put, delete`` with ``url``.

    ``bound``: the request was for one version of the object, so a failed condition means that it changed.
    """
    status, code = refusal.status, refusal.code or ""
    if code in _CLOCK:
        return ClockSkewed(
            "the store refuses this machine's clock: it is too far from the store's",
            url=url,
            hint="set the clock, for example with NTP",
        )
    if code in _EXPIRED:
        return CredentialsExpired("the credentials have expired", url=url, hint=_EXPIRED_HINT)
    if code == "NoSuchBucket":
        return NotFound("no such bucket", url=url)
    if status == 404 or code in {"NoSuchKey", "NotFound"}:
        return NotFound("no such object" if doing != "list" else "no such bucket or prefix", url=url)
    if status in {409, 412, 304} or code in {"PreconditionFailed", "ConditionalRequestConflict"}:
        if bound:
            return Changed("the object is no longer the version that was opened", url=url)
        return PreconditionFailed("the object is not in the state that the write requires", url=url)
    if status == 416 or code == "InvalidRange":
        return Changed("the object is shorter than the range that was asked for", url=url)
    if status in {429, 503} or code in _THROTTLED:
        return Throttled(f"the store asks for fewer requests ({code or status})", url=url)
    if status in {301, 307} or code in _ELSEWHERE:
        return StoreError(
            f"the bucket is in another region or behind another endpoint ({code or status})",
            url=url,
            hint="set AWS_REGION or AWS_ENDPOINT_URL",
        )
    if status in {401, 403} or code in _BAD_KEYS or code == "AccessDenied":
        return _denied(refusal, doing, url)
    return _failed(refusal, doing, url)


def _denied(refusal: Refusal, doing: str, url: str) -> StoreError:
    if refusal.code in _BAD_KEYS:
        return CredentialsRefused(_BAD_KEYS[refusal.code], url=url, hint=credential_hint(url))
    if refusal.status == 401:
        said = f": {shorten(refusal.detail)}" if refusal.detail else ""
        return CredentialsRefused(f"no credentials that the store accepts{said}", url=url, hint=credential_hint(url))
    right = _RIGHTS[doing]
    if doing in {"head", "get"}:
        # Without the right to list, a store says 403 for a key that is not there as well.
        return Denied("missing or not allowed", url=url, hint=f"needs {right}; with s3:ListBucket a store tells which")
    if doing == "list":
        return Denied("listing is not allowed", url=url, hint=f"needs {right}; or name the objects by their full URLs")
    return Denied(f"to {doing} is not allowed", url=url, hint=f"needs {right}")


def _failed(refusal: Refusal, doing: str, url: str) -> StoreError:
    status, detail = refusal.status, shorten(refusal.detail)
    if refusal.stalled:
        return Stalled("no answer for too long", url=url)
    if refusal.garbled:
        return Corrupt(f"a wrong reply: {detail}", url=url)
    if refusal.cut:
        return Unavailable(f"the connection failed: {detail}", url=url)
    if status is not None and (status >= 500 or status == 408):
        return Unavailable(f"the store failed with status {status} {refusal.code or ''}", url=url)
    said = " ".join(str(part) for part in (status, refusal.code, detail) if part)
    return StoreError(f"the store refused to {doing}: {said or 'no reason given'}", url=url)


def shorten(text: str, limit: int = 200) -> str:
    """One line of at most ``limit`` characters. Queries of URLs go first, so that less of the rest is cut."""
    line = re.sub(r"\s+", " ", redact(text)).strip()
    return line if len(line) <= limit else line[: limit - 1] + "…"
