"""What obstore's exceptions mean. They carry no fields, only a type and a text, so the text is read. Pure.

The text ends in the Rust value (``Debug source: ...``); what is matched are its variant names and, for HTTP replies,
the status line and the XML body. Keys appear in the text too: percent-encoded in URLs, where none of the patterns can
match, and as they are in ``path: "..."``, which is cut out first.
"""

from __future__ import annotations

import re

from obstore import exceptions as obx

from .replies import Refusal

OBSTORE_ERRORS = (obx.BaseError, OSError, ValueError, NotImplementedError)
"""Everything an obstore call raises for a failed request."""

_PATH = re.compile(r'path: "[^\n]*",')
_STATUS = re.compile(r"non-2xx status code: (\d{3})")
_CODE = re.compile(r"<Code>\s*([A-Za-z0-9_.]+)\s*</Code>")
_MESSAGE = re.compile(r"<Message>\s*([^<]*)</Message>")
_CAUSE = re.compile(r'(?:message|error): "([^"\n]{1,120})"')
_DEBUG = re.compile(r"\s*Debug source:.*", re.DOTALL)
_LEAD = re.compile(r"^.* in [0-9.]+[µmn]?s - ", re.DOTALL)
_STALLED = re.compile(r"kind: Timeout,|source: TimedOut,")
_GARBLED = re.compile(
    r"source: (UnexpectedRange|NotPartial|ParseContentRange|InvalidContentRange|NoContentRange|InvalidListResponse|"
    r"Header|Metadata|InvalidContentLength|MissingContentLength)\b"
)
_TOKEN = re.compile(r"source: TokenRequest \{")
_REDIRECTED = re.compile(r"inner: BareRedirect,")
_BEYOND_END = re.compile(r"source: StartTooLarge \{")
_OS_STATUS = {
    "2": 404,  # ENOENT
    "13": 403,  # EACCES
    "20": 404,  # ENOTDIR: a part of the path is a file
    "21": 404,  # EISDIR
    "36": 400,  # ENAMETOOLONG
}
_OS_ERROR = re.compile(r"\(os error (\d+)\)")


def refusal_of(error: BaseException) -> Refusal:
    """Status, code and kind of failure that an obstore exception stands for."""
    text = _PATH.sub("", str(error))
    code = _search(_CODE, text)
    detail = _search(_MESSAGE, text) or _search(_CAUSE, text) or _LEAD.sub("", _DEBUG.sub("", text))
    status = _status(error, text)
    if status is not None:
        return Refusal(status, code, detail)
    if _STALLED.search(text):
        return Refusal(stalled=True, detail=detail)
    if _GARBLED.search(text):
        return Refusal(garbled=True, detail=detail)
    return Refusal(cut=True, code=code, detail=detail)


def _status(error: BaseException, text: str) -> int | None:
    if isinstance(error, FileNotFoundError):
        return 404
    if isinstance(error, obx.AlreadyExistsError | obx.PreconditionError | obx.NotModifiedError):
        return 412
    if isinstance(error, obx.PermissionDeniedError):
        return 403
    if isinstance(error, obx.UnauthenticatedError):
        return 401
    if isinstance(error, obx.NotSupportedError | obx.InvalidPathError | NotImplementedError | ValueError):
        return 400
    said = _search(_STATUS, text)
    if said is not None:
        # A refused request for a token is no refusal by the store.
        return 401 if _TOKEN.search(text) and said.startswith("4") else int(said)
    if _BEYOND_END.search(text):
        return 416
    if _REDIRECTED.search(text):
        return 301
    return _OS_STATUS.get(_search(_OS_ERROR, text) or "") if "LocalFileSystem" in text else None


def _search(pattern: re.Pattern[str], text: str) -> str | None:
    match = pattern.search(text)
    return match[1] if match else None
