"""The certificate of a port: a folder with `tls.crt` and `tls.key`, as a Secret of type kubernetes.io/tls is mounted.

Certificates are replaced before they expire, by cert-manager for example, and the kubelet replaces the files within a
minute or two. They are read again when they have changed; connections that exist keep theirs.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import ssl
from dataclasses import dataclass, field
from pathlib import Path

logger = logging.getLogger(__name__)

LOOK_SECONDS = 10.0


@dataclass(eq=False)
class Certificate:
    """Raises OSError where the files cannot be read, do not belong together, or are no certificate and key."""

    folder: Path
    context: ssl.SSLContext = field(init=False)
    """For a server: each new connection gets the certificate that was read last."""
    _current: ssl.SSLContext = field(init=False)
    _digest: bytes = b""

    def __post_init__(self) -> None:
        self.read()
        self.context = self._current
        self.context.sni_callback = self._serve_current

    def read(self) -> bool:
        """Take in the files; whether they have changed. Where they cannot be used what was read before stays.

        Raises:
            OSError: they cannot be used.
        """
        certificate, key = self.folder / "tls.crt", self.folder / "tls.key"
        digest = hashlib.sha256(certificate.read_bytes() + key.read_bytes()).digest()
        if digest == self._digest:
            return False
        # a context of its own: one that serves would have a new certificate and an old key for a moment
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(certificate, key)
        except OSError as error:
            raise OSError(f"{certificate} and {key} cannot be used: {error}") from error
        self._current, self._digest = context, digest
        return True

    def _serve_current(self, connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        connection.context = self._current

    async def follow(self) -> None:
        """Read changes until cancelled."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                if await asyncio.to_thread(self.read):
                    logger.info("serving the certificate that is now in %s", self.folder)
            except OSError as error:
                logger.warning("the certificate in use is kept: %s", error)
