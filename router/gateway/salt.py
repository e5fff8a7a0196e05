"""One namespace of the prefix cache per tenant, which a client's own salt can only narrow."""

from __future__ import annotations

import base64
import hashlib


def namespace_salt(tenant: str, client_salt: str | None) -> str:
    """A salt of 43 characters for the engines.

    Every part is framed by its length, and absence differs from emptiness, so ("a", "bc"), ("ab", "c") and
    ("abc", none) are three namespaces. The digest keeps tenants' names and clients' salts out of logs.
    """
    digest = hashlib.sha256(b"pdserve cache namespace")
    for part in (tenant, client_salt):
        raw = b"" if part is None else part.encode()
        digest.update((b"-" if part is None else b"+") + len(raw).to_bytes(8, "big") + raw)
    return base64.urlsafe_b64encode(digest.digest()).decode().rstrip("=")
