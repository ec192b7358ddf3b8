"""The cluster's own certificate authority, kept in a folder.

    DIR/ca.key, DIR/ca.crt        the authority; ca.crt holds every trusted one, the signing one first
    DIR/issued/ROLE/NAME/         ca.crt, tls.crt and tls.key: the credentials of one process

Keys are readable by their owner only. Each file is replaced atomically.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from tailrace.security.credentials import AUTHORITIES, CERTIFICATE, KEY
from tailrace.security.roles import MEMBERS, Identity, Role, etcd_user, identity_of, server_name

AUTHORITY_DAYS: Final = 3650.0
CERTIFICATE_DAYS: Final = 90.0

_AUTHORITY_KEY: Final = "ca.key"
_ISSUED: Final = "issued"
# Certificates are backdated by this, so that a clock that is behind accepts a new one at once.
_SKEW: Final = datetime.timedelta(minutes=5)
# Roles whose certificates may authenticate a server; an operator's may not.
_SERVERS: Final = MEMBERS | {Role.ETCD}


class AuthorityProblem(Exception):
    """The operation is impossible; the message says why."""


@dataclass(frozen=True, slots=True)
class Issued:
    """An issued certificate and the folder that holds it."""

    identity: Identity
    folder: Path
    not_after: datetime.datetime
    # Host names and addresses in addition to the role's server name.
    hosts: tuple[str, ...]


class Authority:
    """Signs certificates for one cluster."""

    def __init__(
        self, folder: Path, key: ec.EllipticCurvePrivateKey, trusted: list[x509.Certificate]
    ) -> None:
        self.folder = folder
        self._key = key
        # The first is the certificate of `key`.
        self._trusted = trusted

    @classmethod
    def create(cls, folder: Path, days: float = AUTHORITY_DAYS) -> Authority:
        """Create an authority in `folder`. Raise AuthorityProblem when it already holds one, OSError."""
        if (folder / _AUTHORITY_KEY).exists():
            raise AuthorityProblem(f"{folder} already has an authority (new-authority replaces it)")
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        key, certificate = _self_signed(days)
        authority = cls(folder, key, [certificate])
        authority._save()
        return authority

    @classmethod
    def load(cls, folder: Path) -> Authority:
        """Load the authority from `folder`. Raise AuthorityProblem when it is missing or damaged."""
        try:
            key = serialization.load_pem_private_key((folder / _AUTHORITY_KEY).read_bytes(), None)
            trusted = x509.load_pem_x509_certificates((folder / AUTHORITIES).read_bytes())
        except FileNotFoundError as error:
            raise AuthorityProblem(f"no authority in {folder} (tailrace certs init creates one)") from error
        except (OSError, ValueError, TypeError) as error:
            raise AuthorityProblem(f"{folder}: {error}") from error
        if not isinstance(key, ec.EllipticCurvePrivateKey) or trusted[0].public_key() != key.public_key():
            raise AuthorityProblem(f"{folder}: {_AUTHORITY_KEY} is not the key of the first of {AUTHORITIES}")
        return cls(folder, key, trusted)

    @property
    def not_after(self) -> datetime.datetime:
        """Return when the signing authority's certificate expires."""
        return self._trusted[0].not_valid_after_utc

    @property
    def trusted(self) -> int:
        """Return the number of trusted authorities: two while one replaces the other."""
        return len(self._trusted)

    def issue(self, identity: Identity, days: float = CERTIFICATE_DAYS, hosts: Sequence[str] = ()) -> Issued:
        """Create a key and a certificate for the identity, replacing any that it has.

        `hosts`: names and addresses under which foreign clients reach it (those of etcd's members, or of a
        monitor that receives spans). Raise AuthorityProblem, OSError.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        now = datetime.datetime.now(datetime.UTC)
        end = min(now + datetime.timedelta(days=days), self.not_after)
        try:
            names = [*_names(identity), *map(_host, hosts)]
        except ValueError as error:
            raise AuthorityProblem(str(error)) from error
        purposes = [ExtendedKeyUsageOID.CLIENT_AUTH]
        if identity.role in _SERVERS:
            purposes.insert(0, ExtendedKeyUsageOID.SERVER_AUTH)
        certificate = (
            x509.CertificateBuilder()
            .subject_name(_common_name(etcd_user(identity.role)))
            .issuer_name(self._trusted[0].subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _SKEW)
            .not_valid_after(end)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False
            )
            .sign(self._key, hashes.SHA256())
        )
        folder = self._folder_of(identity)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        _replace(folder / AUTHORITIES, self._bundle(), 0o644)
        _replace(folder / KEY, _key_pem(key), 0o600)
        _replace(folder / CERTIFICATE, certificate.public_bytes(serialization.Encoding.PEM), 0o644)
        return Issued(identity, folder, certificate.not_valid_after_utc, tuple(hosts))

    def issued(self) -> list[Issued]:
        """Return all certificates in the folder, by role and name. Raise AuthorityProblem."""
        return [_read(path) for path in sorted(self.folder.glob(f"{_ISSUED}/*/*/{CERTIFICATE}"))]

    def rotate(self, days: float = CERTIFICATE_DAYS) -> list[Issued]:
        """Reissue every certificate to the same identity and hosts.

        Raise AuthorityProblem, OSError.
        """
        return [self.issue(issued.identity, days, issued.hosts) for issued in self.issued()]

    def supersede(self, days: float = AUTHORITY_DAYS) -> None:
        """Sign with a new key from now on, and trust the old authority until `retire`.

        Every process must trust the new authority before it meets a certificate signed by it, so this
        replaces the trust bundles only; `rotate` replaces the certificates. Raise AuthorityProblem, OSError.
        """
        if len(self._trusted) > 1:
            raise AuthorityProblem("an older authority is still trusted (tailrace certs retire-authority)")
        self._key, certificate = _self_signed(days)
        self._trusted.insert(0, certificate)
        self._save()
        self._distribute_bundle()

    def retire(self) -> None:
        """Trust the signing authority only.

        Raise AuthorityProblem while the folder holds a certificate that another authority signed; OSError.
        """
        own_key_id = x509.SubjectKeyIdentifier.from_public_key(self._key.public_key()).digest
        for issued in self.issued():
            certificate = x509.load_pem_x509_certificate((issued.folder / CERTIFICATE).read_bytes())
            by = certificate.extensions.get_extension_for_class(x509.AuthorityKeyIdentifier).value
            if by.key_identifier != own_key_id:
                raise AuthorityProblem(
                    f"{issued.identity} has a certificate of the older authority (tailrace certs rotate)"
                )
        del self._trusted[1:]
        self._save()
        self._distribute_bundle()

    def _folder_of(self, identity: Identity) -> Path:
        return self.folder / _ISSUED / identity.role.value / identity.name

    def _bundle(self) -> bytes:
        return b"".join(issued.public_bytes(serialization.Encoding.PEM) for issued in self._trusted)

    def _save(self) -> None:
        _replace(self.folder / _AUTHORITY_KEY, _key_pem(self._key), 0o600)
        _replace(self.folder / AUTHORITIES, self._bundle(), 0o644)

    def _distribute_bundle(self) -> None:
        for issued in self.issued():
            _replace(issued.folder / AUTHORITIES, self._bundle(), 0o644)


def _self_signed(days: float) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    key = ec.generate_private_key(ec.SECP256R1())
    now = datetime.datetime.now(datetime.UTC)
    # Subjects must differ: two authorities with the same subject cannot be told apart while both are trusted.
    name = _common_name(f"Tailrace authority {now:%Y-%m-%d} {x509.random_serial_number():x}"[:64])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SKEW)
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    return key, certificate


def _common_name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _usage(signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _names(identity: Identity) -> Iterable[x509.GeneralName]:
    yield x509.UniformResourceIdentifier(identity.uri)
    if identity.role in _SERVERS:
        yield x509.DNSName(server_name(identity.role))


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _replace(path: Path, content: bytes, mode: int) -> None:
    """Replace the file atomically: a concurrent reader sees either the old content or the new."""
    partial = path.with_name(f".{path.name}.partial")
    partial.unlink(missing_ok=True)
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with open(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(descriptor)
    partial.replace(path)


def _read(path: Path) -> Issued:
    try:
        certificate = x509.load_pem_x509_certificate(path.read_bytes())
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        identity = identity_of(names.get_values_for_type(x509.UniformResourceIdentifier))
    except (OSError, ValueError, x509.ExtensionNotFound) as error:
        raise AuthorityProblem(f"{path}: {error}") from error
    expected_name = server_name(identity.role)
    hosts = [name for name in names.get_values_for_type(x509.DNSName) if name != expected_name]
    hosts += map(str, names.get_values_for_type(x509.IPAddress))
    return Issued(identity, path.parent, certificate.not_valid_after_utc, tuple(hosts))
