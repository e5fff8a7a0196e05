"""API keys of several tenants. Only digests are kept, and comparing takes the same time for every key."""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from cluster.config import TenantsConfig
from cluster.errors import ConfigError

log = logging.getLogger(__name__)

MIN_KEY_CHARS = 8
TENANT = re.compile(r"[A-Za-z0-9._:-]{1,64}")


class ApiKeys:
    """Key digests and the tenant of each."""

    def __init__(self, tenants: Mapping[bytes, str]) -> None:
        self._tenants = dict(tenants)

    def tenant(self, presented: str) -> str | None:
        """Whose key it is, None for an unknown one. Compares with every key, whatever matches."""
        digest = _digest(presented)
        found = None
        for known, tenant in self._tenants.items():
            if hmac.compare_digest(known, digest):
                found = tenant
        return found

    def __len__(self) -> int:
        return len(self._tenants)

    def __repr__(self) -> str:
        return f"ApiKeys({len(self)} keys)"

    @classmethod
    def parse(cls, pairs: Iterable[str], path: str) -> ApiKeys:
        """Read `key tenant` pairs; empty ones and those that begin with `#` are skipped.

        Raises:
            ConfigError: a pair cannot be used. It names the pair's number, never the key.
        """
        tenants: dict[bytes, str] = {}
        for number, pair in enumerate(pairs, 1):
            parts = pair.split()
            if not parts or parts[0].startswith("#"):
                continue
            if len(parts) != 2:
                raise ConfigError(path, f"entry {number} has {len(parts)} words", "write `key tenant`")
            key, tenant = parts
            if len(key) < MIN_KEY_CHARS:
                raise ConfigError(
                    path, f"the key of entry {number} has {len(key)} characters, fewer than {MIN_KEY_CHARS}"
                )
            if not TENANT.fullmatch(tenant):
                raise ConfigError(
                    path, f"the tenant of entry {number} is {tenant!r}", "use up to 64 letters, digits and . _ : -"
                )
            if tenants.setdefault(_digest(key), tenant) != tenant:
                raise ConfigError(path, f"the key of entry {number} belongs to another tenant already")
        if not tenants:
            raise ConfigError(path, "holds no key", "write `key tenant` pairs, or remove the setting")
        return cls(tenants)


class KeyFile:
    """Keys in a file, read again when it changes: a rotated secret takes effect without a restart."""

    def __init__(self, path: str | Path, check_every_s: float = 5.0) -> None:
        self._path = Path(path)
        self._check_every_s = check_every_s
        self._next_check_s = float("-inf")
        self._stamp = self._stat()
        self._keys = self._read()

    def keys(self, now: float) -> ApiKeys:
        """The keys as of at most `check_every_s` ago. A file that became unusable leaves the last ones in force."""
        if now >= self._next_check_s:
            self._next_check_s = now + self._check_every_s
            try:
                stamp = self._stat()
                if stamp != self._stamp:
                    self._keys = self._read()
                    self._stamp = stamp
                    log.info("API keys read again: %d keys", len(self._keys))
            except ConfigError as mistake:
                log.error("API keys kept as they were: %s", mistake)
        return self._keys

    def _stat(self) -> tuple[int, int, int]:
        try:
            stat = self._path.stat()
        except OSError as e:
            raise ConfigError(
                "router.tenants.api_keys_file", f"{self._path} cannot be read ({e.strerror})", "give the path of a file"
            ) from e
        return stat.st_mtime_ns, stat.st_size, stat.st_ino

    def _read(self) -> ApiKeys:
        try:
            text = self._path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as e:
            raise ConfigError(
                "router.tenants.api_keys_file", f"{self._path} cannot be read as text", "give lines of `key tenant`"
            ) from e
        return ApiKeys.parse(text.splitlines(), "router.tenants.api_keys_file")


class KeyRing:
    """Every configured source of keys."""

    def __init__(self, file: KeyFile | None, fixed: ApiKeys | None) -> None:
        self._file = file
        self._fixed = fixed

    @classmethod
    def from_config(cls, config: TenantsConfig, environ: Mapping[str, str]) -> KeyRing | None:
        """None where no key is asked for.

        Raises:
            ConfigError: the file or the variable cannot be used.
        """
        if config.api_keys_file is None and config.api_keys_env is None:
            return None
        fixed = None
        if config.api_keys_env is not None:
            value = environ.get(config.api_keys_env)
            if value is None:
                raise ConfigError(
                    "router.tenants.api_keys_env", f"the variable {config.api_keys_env} is not set", "set or remove it"
                )
            fixed = ApiKeys.parse(value.split(","), "router.tenants.api_keys_env")
        return cls(KeyFile(config.api_keys_file) if config.api_keys_file is not None else None, fixed)

    def tenant(self, presented: str, now: float) -> str | None:
        sources = [s for s in (self._file.keys(now) if self._file else None, self._fixed) if s is not None]
        found = [source.tenant(presented) for source in sources]
        return next((tenant for tenant in found if tenant is not None), None)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
