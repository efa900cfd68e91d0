"""Certificates as an administrator would have them: of a CA, for a name or an address, also expired ones."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from elasticcb.security.tls import TLSFiles

NOW = datetime.datetime.now(datetime.timezone.utc)
DAY = datetime.timedelta(days=1)


class CA:
    """Signs certificates; all files lie in `folder`."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self._folder, self._name = folder, name
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"The {name} of a test")])
        builder = self._begin(self._issuer, self._key, NOW + 10 * DAY)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        self.path = folder / f"{name}.pem"
        self.path.write_bytes(builder.sign(self._key, hashes.SHA256()).public_bytes(Encoding.PEM))

    def _begin(self, subject, key, end):
        builder = x509.CertificateBuilder().subject_name(subject).issuer_name(self._issuer)
        builder = builder.public_key(key.public_key()).serial_number(x509.random_serial_number())
        return builder.not_valid_before(NOW - 10 * DAY).not_valid_after(end)

    def issue(self, name: str = "own", *, address: str = "127.0.0.1", dns: str = "", days: float = 1.0) -> TLSFiles:
        """A certificate for an address, or for a DNS name, that is valid for some days; a negative number: expired."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        alternative = x509.DNSName(dns) if dns else x509.IPAddress(ipaddress.ip_address(address))
        builder = self._begin(subject, key, NOW + days * DAY)
        builder = builder.add_extension(x509.SubjectAlternativeName([alternative]), critical=False)
        cert, key_path = (self._folder / f"{self._name}-{name}-{kind}.pem" for kind in ("cert", "key"))
        cert.write_bytes(builder.sign(self._key, hashes.SHA256()).public_bytes(Encoding.PEM))
        key_path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        return TLSFiles(tls_cert=str(cert), tls_key=str(key_path), tls_ca=str(self.path))
