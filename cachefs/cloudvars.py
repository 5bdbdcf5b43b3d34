"""The clouds' own environment variables: which travel with an origin, and which a daemon may keep. Pure.

A daemon serves clients of other environments than that of the one that started it. So what names an account, a key or
an endpoint travels with each client's :class:`~cachefs.config.Origin`, and a daemon's own environment holds none of
it. What is left there says where files, roles and metadata services are, which is the same for the whole node.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

GOOGLE: Mapping[str, str] = MappingProxyType(
    {
        "GOOGLE_SERVICE_ACCOUNT": "service_account",
        "GOOGLE_SERVICE_ACCOUNT_PATH": "service_account",
        "GOOGLE_SERVICE_ACCOUNT_KEY": "service_account_key",
        "GOOGLE_APPLICATION_CREDENTIALS": "application_credentials",
        "GOOGLE_BEARER_TOKEN": "bearer_token",
        "GOOGLE_BASE_URL": "base_url",
        "GOOGLE_SKIP_SIGNATURE": "skip_signature",
    }
)
"""Variables of ``gs://`` stores and what obstore calls them; of several for one option the first counts."""

AZURE: Mapping[str, str] = MappingProxyType(
    {
        "AZURE_STORAGE_ACCOUNT_NAME": "account_name",
        "AZURE_STORAGE_ACCOUNT_KEY": "account_key",
        "AZURE_STORAGE_ACCESS_KEY": "account_key",
        "AZURE_STORAGE_MASTER_KEY": "account_key",
        "AZURE_STORAGE_SAS_TOKEN": "sas_key",
        "AZURE_STORAGE_SAS_KEY": "sas_key",
        "AZURE_STORAGE_TOKEN": "token",
        "AZURE_STORAGE_CLIENT_ID": "client_id",
        "AZURE_CLIENT_ID": "client_id",
        "AZURE_STORAGE_CLIENT_SECRET": "client_secret",
        "AZURE_CLIENT_SECRET": "client_secret",
        "AZURE_STORAGE_TENANT_ID": "tenant_id",
        "AZURE_STORAGE_AUTHORITY_ID": "tenant_id",
        "AZURE_TENANT_ID": "tenant_id",
        "AZURE_AUTHORITY_ID": "tenant_id",
        "AZURE_STORAGE_AUTHORITY_HOST": "authority_host",
        "AZURE_AUTHORITY_HOST": "authority_host",
        "AZURE_STORAGE_ENDPOINT": "endpoint",
        "AZURE_ENDPOINT": "endpoint",
        "AZURE_STORAGE_USE_EMULATOR": "use_emulator",
        "AZURE_MSI_ENDPOINT": "msi_endpoint",
        "AZURE_IDENTITY_ENDPOINT": "msi_endpoint",
        "AZURE_OBJECT_ID": "object_id",
        "AZURE_MSI_RESOURCE_ID": "msi_resource_id",
        "AZURE_FEDERATED_TOKEN_FILE": "federated_token_file",
        "AZURE_USE_AZURE_CLI": "use_azure_cli",
        "AZURE_SKIP_SIGNATURE": "skip_signature",
    }
)
"""The same of ``az://`` stores."""

PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")
"""Variables that name a proxy and what goes past it, in capitals; the same in small letters count first."""

_CLOUDS = ("AWS_", "GOOGLE_", "AZURE_", "FSSPEC_S3")
_OWN = frozenset({"NEARFLASH_PROXY", "NEARFLASH_SSE_CUSTOMER_KEY"})
_WHERE = frozenset(
    {
        "AWS_CONFIG_FILE",
        "AWS_SHARED_CREDENTIALS_FILE",
        "AWS_CA_BUNDLE",
        "AWS_WEB_IDENTITY_TOKEN_FILE",
        "AWS_ROLE_ARN",
        "AWS_ROLE_SESSION_NAME",
        "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
        "AWS_CONTAINER_CREDENTIALS_FULL_URI",
        "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE",
        "AWS_EC2_METADATA_DISABLED",
        "AWS_EC2_METADATA_SERVICE_ENDPOINT",
        "AWS_EC2_METADATA_SERVICE_ENDPOINT_MODE",
        "AWS_EC2_METADATA_V1_DISABLED",
        "AWS_METADATA_SERVICE_TIMEOUT",
        "AWS_METADATA_SERVICE_NUM_ATTEMPTS",
        "AWS_STS_REGIONAL_ENDPOINTS",
        "GOOGLE_APPLICATION_CREDENTIALS",
        "GOOGLE_SERVICE_ACCOUNT",
        "GOOGLE_SERVICE_ACCOUNT_PATH",
        "AZURE_CONFIG_DIR",
        "AZURE_FEDERATED_TOKEN_FILE",
        "AZURE_MSI_ENDPOINT",
        "AZURE_IDENTITY_ENDPOINT",
    }
)


def carried(environ: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """What an origin takes along of the variables of Google's and Azure's stores and of proxies, sorted by name."""
    found = {name: value for name, value in environ.items() if value and (name in GOOGLE or name in AZURE)}
    for name in PROXIES:
        if value := environ.get(name.lower()) or environ.get(name):
            found[name] = value
    return tuple(sorted(found.items()))


def store_options(table: Mapping[str, str], extra: Iterable[tuple[str, str]]) -> dict[str, str]:
    """The options that ``extra`` sets of one cloud, by obstore's names."""
    given = dict(extra)
    options: dict[str, str] = {}
    for name, option in table.items():
        if name in given:
            options.setdefault(option, given[name])
    return options


def belongs_to_a_client(name: str) -> bool:
    """Whether a variable is one client's business: an account, a key, an endpoint, a region, a profile, a proxy of its
    own."""
    return name in _OWN or (name.startswith(_CLOUDS) and name not in _WHERE)
