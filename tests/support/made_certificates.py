"""Certificates for tests: authorities made at test time, and what they sign."""

from __future__ import annotations

import ipaddress
import os
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

PEM = serialization.Encoding.PEM


class Authority:
    """Signs certificates, whose files are below `folder`."""

    def __init__(self, folder: Path, name: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._name = folder, _named(f"authority {name}")
        self._key = ec.generate_private_key(ec.SECP256R1())
        self.path = str(folder / f"{name}.pem")
        usage = x509.KeyUsage(
            digital_signature=True,
            key_cert_sign=True,
            crl_sign=True,
            content_commitment=False,
            key_encipherment=False,
            data_encipherment=False,
            key_agreement=False,
            encipher_only=False,
            decipher_only=False,
        )
        builder = _builder(self._name, self._name, self._key, timedelta(days=1))
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        made = builder.add_extension(usage, critical=True).sign(self._key, hashes.SHA256())
        Path(self.path).write_bytes(made.public_bytes(PEM))

    def sign(self, name: str, *alternative: str, days: float = 1.0, file: str = "") -> tuple[str, str]:
        """Paths of a certificate and its key: `name` is the common one, `alternative` are hosts, addresses
        and URIs. Negative days: it has expired. Files that are there are replaced, each in one go.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        builder = _builder(_named(name), self._name, key, timedelta(days=days))
        if alternative:
            names = x509.SubjectAlternativeName([_general(one) for one in alternative])
            builder = builder.add_extension(names, critical=False)
        made = builder.sign(self._key, hashes.SHA256())
        stem = self._folder / (file or name.replace("/", "_"))
        hidden = key.private_bytes(PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        paths = Path(f"{stem}.crt"), Path(f"{stem}.key")
        for path, data in zip(paths, (made.public_bytes(PEM), hidden), strict=True):
            replaced(path, data)
        return str(paths[0]), str(paths[1])


def replaced(path: Path, data: bytes) -> None:
    """Writes a file for its owner alone, in one go."""
    beside = path.with_name(f".{path.name}.new")
    beside.touch(mode=0o600)
    beside.write_bytes(data)
    os.replace(beside, path)


def padded_alike(one: tuple[str, str], other: tuple[str, str]) -> None:
    """Makes the files of two certificates and their keys as long as each other."""
    for paths in zip(one, other, strict=True):
        texts = [Path(path).read_bytes() for path in paths]
        for path, text in zip(paths, texts, strict=True):
            Path(path).write_bytes(text.ljust(max(map(len, texts)), b"\n"))


def written_over(old: tuple[str, str], new: tuple[str, str]) -> None:
    """Writes a certificate and its key into the files of another, whose times of modification stay."""
    for path, source in zip(old, new, strict=True):
        before = os.stat(path)
        with open(path, "r+b") as file:
            file.write(Path(source).read_bytes())
        until = time.monotonic() + 5.0
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        while os.stat(path).st_ctime_ns == before.st_ctime_ns:
            assert time.monotonic() < until, "the file system's clock stands"
            os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # its ticks take some milliseconds


def _builder(
    name: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, lives: timedelta
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=10))
        .not_valid_after(now + lives)
    )


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _general(name: str) -> x509.GeneralName:
    if "://" in name:
        return x509.UniformResourceIdentifier(name)
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)
