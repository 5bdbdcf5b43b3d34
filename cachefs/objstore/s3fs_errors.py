"""What the exceptions of s3fs's client (aiobotocore over aiohttp) mean. Pure."""

from __future__ import annotations

from aiohttp import ClientError as HttpError
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectTimeoutError,
    EndpointConnectionError,
    HTTPClientError,
    NoCredentialsError,
    ReadTimeoutError,
)

from .replies import Refusal

S3FS_ERRORS = (BotoCoreError, ClientError, HttpError, OSError, ValueError)
"""Everything a client call or the reading of its body raises for a failed request."""


def refusal_of(error: BaseException) -> Refusal:
    """Status, code and kind of failure that one of ``S3FS_ERRORS`` stands for."""
    if isinstance(error, ClientError):
        said = error.response.get("Error", {})
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        code = str(said.get("Code") or "")
        # A reply without a body has its status for a code.
        return Refusal(int(status) if status else None, None if code.isdigit() else code, str(said.get("Message", "")))
    if isinstance(error, NoCredentialsError):
        return Refusal(401, None, str(error))
    if isinstance(error, ReadTimeoutError | ConnectTimeoutError | TimeoutError):
        return Refusal(stalled=True, detail=str(error))
    if isinstance(error, EndpointConnectionError | HTTPClientError | HttpError | OSError):
        return Refusal(cut=True, detail=str(error))
    return Refusal(400, type(error).__name__, str(error))
