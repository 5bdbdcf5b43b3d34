"""What is known of each cloud's S3 interface: where it is, and how it wants buckets to be addressed. Pure.

An S3 bucket is addressed in the path (``https://host/bucket/key``) or as a virtual host
(``https://bucket.host/key``). The clouds that refuse path style refuse it for every request; a bucket name with dots
does not match a TLS wildcard certificate as a virtual host; a server that one runs oneself seldom has a wildcard name.

Each preset names the provider's own page that it was checked against (``source``).
"""

from __future__ import annotations

import re
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
    ``hosts``: what the names of the cloud's own endpoints end in, to know it by. ``bulk_delete``: DeleteObjects works.
    ``before_region``: what comes before the region in such a name, as a pattern. ``source``: title and address of the
    provider's rules.
    """

    name: str
    source: str
    endpoint: str | None = None
    virtual: bool = False
    virtual_only: bool = False
    region: str = "us-east-1"
    hosts: tuple[str, ...] = ()
    bulk_delete: bool = True
    before_region: str | None = None

    def region_of(self, host: str) -> str | None:
        """The region that the name of one of this cloud's own endpoints holds: two words at least, then its network."""
        if self.before_region is None:
            return None
        found = re.match(rf"{self.before_region}([a-z0-9]+(?:-[a-z0-9]+)+?)(?:-internal)?\.", host)
        return found[1] if found else None


PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        p.name: p
        for p in (
            Preset(
                "aws",
                # A wildcard certificate covers one label, so buckets with dots are no virtual hosts under https.
                "Virtual hosting of general purpose buckets, "
                "https://docs.aws.amazon.com/AmazonS3/latest/userguide/VirtualHosting.html",
                "https://s3.{region}.amazonaws.com",
                virtual=True,
                hosts=(".amazonaws.com", ".amazonaws.com.cn"),
                before_region=r"s3\.(?:dualstack\.)?",
            ),
            Preset(
                "aliyun",
                # All requests for a bucket have it in the domain name; the S3 interface has endpoints of its own.
                "Accessing OSS with the AWS SDK, "
                "https://help.aliyun.com/en/oss/developer-reference/use-aws-sdks-to-access-oss; OSS domain names, "
                "https://www.alibabacloud.com/help/en/oss/user-guide/oss-domain-names",
                "https://s3.oss-{region}.aliyuncs.com",
                virtual=True,
                virtual_only=True,
                region="cn-hangzhou",
                hosts=(".aliyuncs.com",),
                before_region=r"(?:s3\.)?oss-(?!accelerate)",
            ),
            Preset(
                "huawei",
                # Path style exists, and some buckets refuse it (VirtualHostDomainRequired).
                "Endpoints and access domain names, https://support.huaweicloud.com/en-us/devg-obs/obs_06_0007.html; "
                "VirtualHostDomainRequired, https://support.huaweicloud.com/intl/en-us/api-obs/obs_errorcode_0014.html",
                "https://obs.{region}.myhuaweicloud.com",
                virtual=True,
                region="cn-north-4",
                hosts=(".myhuaweicloud.com", ".myhuaweicloud.eu"),
                before_region=r"obs\.",
            ),
            Preset(
                "ksyun",
                # All requests for a bucket have it in the domain name; older pages give path style as well.
                "Use KS3 endpoints, https://endocs.ksyun.com/documents/37089",
                "https://ks3-{region}.ksyuncs.com",
                virtual=True,
                region="cn-beijing",
                hosts=(".ksyuncs.com", ".ksyun.com"),
                before_region=r"ks3-",
            ),
            Preset(
                "tencent",
                # Buckets made since 2024 refuse path style; a bucket's name ends in the account's number.
                "Bucket domain name security management, https://www.tencentcloud.com/document/product/436/57456",
                "https://cos.{region}.myqcloud.com",
                virtual=True,
                virtual_only=True,
                region="ap-guangzhou",
                hosts=(".myqcloud.com", ".tencentcos.cn"),
                before_region=r"cos(?:-internal)?\.",
            ),
            Preset(
                "minio",
                # Path style, unless the server was given a domain (MINIO_DOMAIN).
                "MinIO server, environment variables, https://github.com/minio/minio/pull/5705",
            ),
            Preset(
                "seaweedfs",
                # Path style, unless the gateway was given a domain.
                "Amazon S3 API, https://github.com/seaweedfs/seaweedfs/wiki/Amazon-S3-API",
            ),
            Preset(
                "r2",
                # https://<account>.r2.cloudflarestorage.com, also <account>.eu and .fedramp.
                "S3 API compatibility, https://developers.cloudflare.com/r2/api/s3/api/",
                region="auto",
                hosts=(".r2.cloudflarestorage.com",),
            ),
            Preset(
                "gcs",
                # Either style; path style is right for every name.
                "Request endpoints, https://cloud.google.com/storage/docs/request-endpoints; "
                "Interoperability, https://cloud.google.com/storage/docs/interoperability",
                "https://storage.googleapis.com",
                region="auto",
                hosts=(".storage.googleapis.com",),
                bulk_delete=False,
            ),
            Preset(
                "azure",
                # No S3 interface: az://container/key, at https://<account>.blob.core.windows.net/container/key.
                "Naming and referencing containers, blobs, and metadata, https://learn.microsoft.com/rest/api/"
                "storageservices/naming-and-referencing-containers--blobs--and-metadata",
                hosts=(".blob.core.windows.net",),
            ),
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
    return next((p for p in PRESETS.values() if p.hosts and ("." + host).endswith(p.hosts)), None)


def resolve(origin: Origin, bucket: str) -> Access:
    """Endpoint, region and addressing style for one bucket of an S3 origin.

    What the origin says wins; then what the bucket's name rules out; then the preset; a custom endpoint without a
    preset is path style. The region is that of the endpoint's name where nobody gives one. Raises
    :class:`ConfigError` for an unknown preset or style, a preset that needs an endpoint and has none, or a malformed
    endpoint.
    """
    preset = find_preset(origin)
    if preset is not None and preset.name == "azure":
        raise ConfigError("Azure does not speak S3", url=f"s3://{bucket}", hint="write az://container/key")
    region = origin.region or _region_of(origin.endpoint, preset)
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


def _region_of(endpoint: str | None, preset: Preset | None) -> str:
    if preset is None:
        return "us-east-1"
    host = (urlsplit(endpoint).hostname or "") if endpoint else ""
    return preset.region_of(host) or preset.region


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
