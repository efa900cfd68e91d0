"""A CA for one job: it signs one certificate, which all processes of the job share, and its own key is thrown away."""

from __future__ import annotations

import datetime
import importlib.util
import os
from pathlib import Path

from elasticcb.errors import UsageError
from elasticcb.security.tls import TLSFiles

NAME = "elasticcb-job"  # that the certificate is for, wherever its process listens
VALID_DAYS = 30
_CLOCKS_DIFFER = datetime.timedelta(hours=1)  # between machines, at most
_FOLDER = "tls"


def check_installed() -> None:
    """Raises `UsageError` when what makes certificates is not there."""
    if importlib.util.find_spec("cryptography") is None:
        raise UsageError(
            "To make certificates for a job takes the package cryptography, which is not installed. Run `pip install "
            "'elasticcb[tls]'`, or give certificates of your own by tls_cert, tls_key and tls_ca."
        )


def make_certificates(job: str) -> TLSFiles:
    """Makes a CA, and a certificate with its key, in `tls` in the job's folder, which its owner alone can read.

    Those that are there already are replaced. Raises `UsageError` when `cryptography` is not installed, or the files
    can't be written.
    """
    check_installed()
    contents = _signed()
    folder = Path(job).absolute() / _FOLDER
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name, content in contents.items():
            _write(folder / name, content)
    except OSError as error:
        raise UsageError(f"The certificates of the job can't be written to {folder}: {error}.") from error
    cert, key_file, ca_file = (str(folder / name) for name in contents)
    return TLSFiles(cert, key_file, ca_file, NAME)


def _signed() -> dict[str, bytes]:
    """A certificate, its key and the certificate of a new CA that has signed it, by file name."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    now = datetime.datetime.now(datetime.timezone.utc)
    ca_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    ca_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"{NAME} CA")])

    def begin(name: x509.Name, public_key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        builder = x509.CertificateBuilder().subject_name(name).issuer_name(ca_name).public_key(public_key)
        builder = builder.serial_number(x509.random_serial_number())
        builder = builder.not_valid_before(now - _CLOCKS_DIFFER)
        builder = builder.not_valid_after(now + datetime.timedelta(days=VALID_DAYS))
        of_ca = x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key())
        builder = builder.add_extension(of_ca, critical=False)
        return builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)

    def usage(signs_certificates: bool) -> x509.KeyUsage:
        return x509.KeyUsage(
            digital_signature=not signs_certificates,
            key_cert_sign=signs_certificates,
            crl_sign=signs_certificates,
            content_commitment=False,
            key_encipherment=False,
            data_encipherment=False,
            key_agreement=False,
            encipher_only=False,
            decipher_only=False,
        )

    ca = begin(ca_name, ca_key.public_key())
    ca = ca.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    ca = ca.add_extension(usage(signs_certificates=True), critical=True)
    own = begin(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, NAME)]), key.public_key())
    own = own.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    own = own.add_extension(usage(signs_certificates=False), critical=True)
    purposes = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    own = own.add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
    own = own.add_extension(x509.SubjectAlternativeName([x509.DNSName(NAME)]), critical=False)

    return {
        "cert.pem": own.sign(ca_key, hashes.SHA256()).public_bytes(Encoding.PEM),
        "key.pem": key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
        "ca.pem": ca.sign(ca_key, hashes.SHA256()).public_bytes(Encoding.PEM),
    }


def _write(path: Path, content: bytes) -> None:
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
