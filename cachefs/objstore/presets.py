"""What is known of each cloud's S3 interface: where it is, and how it wants buckets to be addressed. Pure.

An S3 bucket is addressed in the path (``https://host/bucket/key``) or as a virtual host
(``https://bucket.host/key``). The clouds that refuse path style refuse it for every request; a bucket name with dots
does not match a TLS wildcard certificate as a virtual host; a server that one runs oneself seldom has a wildcard name.

Endpoint patterns: the providers' own pages on S3-compatible access.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from urllib.parse import urlsplit

from ..config import Origin
from ..errors import ConfigError


@dataclass(frozen=True)
class Preset:
    """One cloud. ``endpoint`` may hold ``{region}``; ``None``: the user has to name it.

    ``virtual``: buckets are virtual hosts unless something speaks against it; ``virtual_only``: path style is refused.
    ``host``: what the names of the cloud's own endpoints end in, to know it by. ``bulk_delete``: DeleteObjects works.
    """

    name: str
    endpoint: str | None = None
    virtual: bool = False
    virtual_only: bool = False
    region: str = "us-east-1"
    host: str | None = None
    bulk_delete: bool = True


PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        p.name: p
        for p in (
            Preset("aws", "https://s3.{region}.amazonaws.com", virtual=True, host=".amazonaws.com"),
            Preset(
                "aliyun",
                "https://s3.oss-{region}.aliyuncs.com",
                virtual=True,
                virtual_only=True,
                region="cn-hangzhou",
                host=".aliyuncs.com",
            ),
            Preset(
                "huawei",
                "https://obs.{region}.myhuaweicloud.com",
                virtual=True,
                region="cn-north-4",
                host=".myhuaweicloud.com",
            ),
            Preset(
                "ksyun",
                "https://ks3-{region}.ksyuncs.com",
                virtual=True,
                region="cn-beijing",
                host=".ksyuncs.com",
            ),
            Preset(
                "tencent",
                "https://cos.{region}.myqcloud.com",
                virtual=True,
                virtual_only=True,
                region="ap-guangzhou",
                host=".myqcloud.com",
            ),
            Preset("minio"),
            Preset("seaweedfs"),
            Preset("r2", region="auto", host=".r2.cloudflarestorage.com"),
            Preset(
                "gcs", "https://storage.googleapis.com", region="auto", host="storage.googleapis.com", bulk_delete=False
            ),
            Preset("azure"),
        )
    }
)


@dataclass(frozen=True)
class Access:
    """How to reach one bucket. ``endpoint`` is without the bucket."""

    endpoint: str
    region: str
    virtual: bool
    bulk_delete: bool = True

    @property
    def plain_http(self) -> bool:
        return self.endpoint.startswith("http://")

    def bucket_endpoint(self, bucket: str) -> str:
        """The endpoint with the bucket as its first label, for clients that want it so; path style: unchanged."""
        if not self.virtual:
            return self.endpoint
        scheme, _, host = self.endpoint.partition("://")
        return f"{scheme}://{bucket}.{host}"


def find_preset(origin: Origin) -> Preset | None:
    """The preset that an origin names, or that its endpoint's host gives away; ``None`` for an unknown server."""
    if origin.preset is not None:
        try:
            return PRESETS[origin.preset.lower()]
        except KeyError:
            raise ConfigError(f"no preset {origin.preset!r}", hint=f"known: {', '.join(sorted(PRESETS))}") from None
    if origin.endpoint is None:
        return PRESETS["aws"]
    host = urlsplit(_checked(origin.endpoint)).hostname or ""
    return next((p for p in PRESETS.values() if p.host is not None and ("." + host).endswith(p.host)), None)


def resolve(origin: Origin, bucket: str) -> Access:
    """Endpoint, region and addressing style for one bucket of an S3 origin.

    What the origin says wins; then what the bucket's name rules out; then the preset; a custom endpoint without a
    preset is path style. Raises :class:`ConfigError` for an unknown preset or style, a preset that needs an endpoint
    and has none, or a malformed endpoint.
    """
    preset = find_preset(origin)
    if preset is not None and preset.name == "azure":
        raise ConfigError("Azure does not speak S3", url=f"s3://{bucket}", hint="write az://container/key")
    region = origin.region or (preset.region if preset else "us-east-1")
    endpoint = origin.endpoint
    if endpoint is None:
        if preset is None or preset.endpoint is None:
            name = preset.name if preset else "none"
            raise ConfigError(f"the preset {name} needs an endpoint", url=f"s3://{bucket}", hint="set AWS_ENDPOINT_URL")
        endpoint = preset.endpoint.format(region=region)
        if preset.name == "aws" and region.startswith("cn-"):
            endpoint += ".cn"  # the Chinese regions are a partition with a domain of its own
    return Access(
        endpoint=_checked(endpoint),
        region=region,
        virtual=_is_virtual(origin, preset, bucket),
        bulk_delete=preset.bulk_delete if preset else True,
    )


def _is_virtual(origin: Origin, preset: Preset | None, bucket: str) -> bool:
    style = origin.addressing.lower()
    if style in {"path", "virtual"}:
        return style == "virtual"
    if style != "auto":
        raise ConfigError(f"addressing {origin.addressing!r}", hint="one of auto, path, virtual")
    if preset is None or not preset.virtual:
        return False
    if preset.virtual_only:
        return True
    own_host = origin.endpoint is None or find_preset(Origin(endpoint=origin.endpoint)) is preset
    return own_host and "." not in bucket


def _checked(endpoint: str) -> str:
    parts = urlsplit(endpoint)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ConfigError(f"the endpoint {endpoint!r} is no URL", hint="write for example http://127.0.0.1:9000")
    return endpoint.rstrip("/")
