"""The CA of a job, and the certificates that its processes issue themselves with its key."""

from __future__ import annotations

import contextlib
import datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.x509 import Certificate

NAME = "elasticcb-job"  # name in all certificates, independent of addresses
LIFE_SECONDS = 30 * 86_400.0  # lifetime of a certificate
_CA_LIFE = datetime.timedelta(days=3650)  # longer than any job
_CLOCKS_DIFFER = datetime.timedelta(hours=1)  # maximum clock difference between machines


def make_ca() -> bytes:
    """A new CA as PEM: its certificate, and its key."""
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    key = ec.generate_private_key(ec.SECP256R1())
    now = datetime.datetime.now(datetime.timezone.utc)
    life = (now - _CA_LIFE, now + _CA_LIFE)  # for machines whose clocks are behind
    certificate = _signed(f"{NAME} CA", key, key, life, signs=True)
    return certificate + key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def issue(ca: bytes) -> tuple[bytes, bytes, bytes]:
    """A certificate for `NAME`, its key, and the CA's certificate without its key, all as PEM.

    Raises `ValueError` if the CA can't be read, has no key, or has expired.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key

    try:
        ca_certificate = x509.load_pem_x509_certificate(ca)
    except ValueError:
        raise ValueError("it contains no certificate") from None
    try:
        ca_key = load_pem_private_key(ca, None)
    except (TypeError, ValueError):
        raise ValueError("it contains no key, or its key has a password") from None
    key = ec.generate_private_key(ec.SECP256R1())
    now = datetime.datetime.now(datetime.timezone.utc)
    end = min(now + datetime.timedelta(seconds=LIFE_SECONDS), ca_certificate.not_valid_after_utc)
    if end <= now:
        raise ValueError("it has expired")
    life = (now - _CLOCKS_DIFFER, end)
    certificate = _signed(NAME, key, ca_key, life, signs=False, issuer=ca_certificate.subject)
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return certificate, private, ca_certificate.public_bytes(Encoding.PEM)


def validity_of(certificate: bytes, ca: bytes) -> tuple[float, float]:
    """The validity period of a certificate, in seconds since the epoch; it ends with that of the CA that signed it.

    Args:
        certificate: PEM; intermediate certificates may follow.
        ca: PEM with the trusted certificates.

    Raises `ValueError` if there is no certificate.
    """
    from cryptography import x509

    first, *others = x509.load_pem_x509_certificates(certificate)
    with contextlib.suppress(ValueError):  # OpenSSL reports their errors
        others += x509.load_pem_x509_certificates(ca)
    return first.not_valid_before_utc.timestamp(), _end_of(first, others)


def _end_of(certificate: Certificate, others: list[Certificate]) -> float:
    """When it expires, or the last of the CAs in `others` that vouch for it."""
    end = certificate.not_valid_after_utc.timestamp()
    signed_by = [each for each in others if each != certificate and _has_signed(each, certificate)]
    return min(end, max((_end_of(each, [it for it in others if it != each]) for each in signed_by), default=end))


def _has_signed(ca: Certificate, certificate: Certificate) -> bool:
    from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm

    try:
        certificate.verify_directly_issued_by(ca)
    except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm):
        return False
    return True


def _signed(
    name: str,
    key: EllipticCurvePrivateKey,
    ca_key: Any,
    life: tuple[datetime.datetime, datetime.datetime],
    signs: bool,
    issuer: Any = None,
) -> bytes:
    """A certificate as PEM."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.serialization import Encoding
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    usage = x509.KeyUsage(
        digital_signature=not signs,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer or subject)
    builder = builder.public_key(key.public_key()).serial_number(x509.random_serial_number())
    builder = builder.not_valid_before(life[0]).not_valid_after(life[1])
    of_ca = x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key())
    builder = builder.add_extension(of_ca, critical=False)
    builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    limits = x509.BasicConstraints(ca=signs, path_length=0 if signs else None)
    builder = builder.add_extension(limits, critical=True).add_extension(usage, critical=True)
    if not signs:
        purposes = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        builder = builder.add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
        builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(NAME)]), critical=False)
    return builder.sign(ca_key, hashes.SHA256()).public_bytes(Encoding.PEM)
