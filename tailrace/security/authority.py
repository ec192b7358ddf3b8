"""The cluster's own certificate authorities, kept in a folder.

    DIR/ca.key, DIR/ca.crt              the cluster's; ca.crt holds every trusted one, the signing one first
    DIR/etcd-ca.key, DIR/etcd-ca.crt    etcd's; it signs for etcd's servers and for its clients, the members
    DIR/issued/ROLE/NAME/               ca.crt, tls.crt and tls.key: the credentials of one process
    DIR/issued/ROLE/NAME/etcd/          the same, with which a member connects to etcd

The keys may be kept elsewhere: only what signs needs them. A key is called .key.new until its authority is
complete.
etcd checks no user on some methods (alarms, leases, compaction): its authority must sign for members alone.
New keys are readable by their owner only. A file that is replaced keeps its owner and mode.
"""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from tailrace.files import replace_file
from tailrace.security.credentials import AUTHORITIES, CERTIFICATE, FOR_ETCD, KEY
from tailrace.security.roles import MEMBERS, Identity, Role, etcd_user, identity_of, server_name

AUTHORITY_DAYS: Final = 3650.0
CERTIFICATE_DAYS: Final = 90.0

# Names of the authorities' files, without these endings.
_CLUSTER: Final = "ca"
_ETCD: Final = "etcd-ca"
_KEY: Final = ".key"
_NEW_KEY: Final = ".key.new"
_TRUSTED: Final = ".crt"
# Roles that deal with etcd alone.
_ETCDS_OWN: Final = frozenset({Role.ETCD, Role.ETCD_ROOT})
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

    def __init__(self, folder: Path, cluster: _Signer, etcd: _Signer | None) -> None:
        self.folder = folder
        self._cluster = cluster
        # None in a folder that was made when etcd had no authority of its own: `supersede` gives it one.
        self._etcd = etcd

    @classmethod
    def create(cls, folder: Path, days: float = AUTHORITY_DAYS) -> Authority:
        """Create an authority in `folder`. Raise AuthorityProblem when it already holds one, OSError.

        If it was interrupted, another call starts over.
        """
        cluster, etcd = folder / _CLUSTER, folder / _ETCD
        files = [path.with_suffix(ending) for path in (cluster, etcd) for ending in (_KEY, _TRUSTED)]
        if not _is_unfinished(cluster) and (found := next(filter(Path.exists, files), None)) is not None:
            raise AuthorityProblem(
                f"{found} exists: {folder} already has an authority; put its keys back if they are elsewhere "
                "(with them, tailrace certs new-authority replaces it), or name another folder"
            )
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        authority = cls(folder, _Signer.create(cluster, days), _Signer.create(etcd, days))
        authority._save()
        return authority

    @classmethod
    def load(cls, folder: Path) -> Authority:
        """Load the authority from `folder`, with the keys that are there. Raise AuthorityProblem when it is
        missing or damaged."""
        cluster, etcd = folder / _CLUSTER, folder / _ETCD
        if not _exists(cluster):
            raise AuthorityProblem(f"no authority in {folder} (tailrace certs init creates one)")
        return cls(folder, _Signer.load(cluster), _Signer.load(etcd) if _exists(etcd) else None)

    @property
    def not_after(self) -> datetime.datetime:
        """Return when the first of the signing authorities' certificates expires."""
        return min(signer.not_after for signer in self._signers())

    @property
    def trusted(self) -> int:
        """Return the number of trusted authorities: two while one replaces the other."""
        return len(self._cluster.trusted)

    @property
    def separates_etcd(self) -> bool:
        """Return whether etcd has an authority of its own."""
        return self._etcd is not None

    def issue(self, identity: Identity, days: float = CERTIFICATE_DAYS, hosts: Sequence[str] = ()) -> Issued:
        """Create a key and a certificate for the identity, replacing any that it has; for a member also those
        for etcd.

        `hosts`: names and addresses under which foreign clients reach it (those of etcd's members, or of a
        monitor that receives spans). Raise AuthorityProblem, OSError.
        """
        folder = self._folder_of(identity)
        end = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=days)
        try:
            names = [*_names(identity), *map(_host, hosts)]
        except ValueError as error:
            raise AuthorityProblem(str(error)) from error
        purposes = [ExtendedKeyUsageOID.CLIENT_AUTH]
        if identity.role in _SERVERS:
            purposes.insert(0, ExtendedKeyUsageOID.SERVER_AUTH)
        self._require_keys([identity.role])
        certificate = self._signer_of(identity.role).issue(folder, identity, end, names, purposes)
        if self._etcd is not None and identity.role in MEMBERS:
            uri = x509.UniformResourceIdentifier(identity.uri)
            self._etcd.issue(folder / FOR_ETCD, identity, end, [uri], [ExtendedKeyUsageOID.CLIENT_AUTH])
        return Issued(identity, folder, certificate.not_valid_after_utc, tuple(hosts))

    def issued(self) -> list[Issued]:
        """Return all certificates in the folder, by role and name. Raise AuthorityProblem."""
        return [_read(path) for path in sorted(self.folder.glob(f"{_ISSUED}/*/*/{CERTIFICATE}"))]

    def rotate(self, days: float = CERTIFICATE_DAYS) -> list[Issued]:
        """Reissue every certificate to the same identity and hosts.

        Raise AuthorityProblem, OSError.
        """
        before = self.issued()
        self._require_keys(issued.identity.role for issued in before)
        return [self.issue(issued.identity, days, issued.hosts) for issued in before]

    def supersede(self, days: float = AUTHORITY_DAYS) -> None:
        """Sign with new keys from now on, and trust the old authorities until `retire`.

        Every process must trust the new authorities before it meets a certificate signed by them, so this
        replaces the trust bundles only; `rotate` replaces the certificates. If it was interrupted, another
        call finishes it. Raise AuthorityProblem, OSError.
        """
        # Without its key nothing tells which of several authorities has signed.
        for signer in self._signers():
            signer.require_key()
        # The cluster's key is saved last.
        if len(self._cluster.trusted) > 1:
            raise AuthorityProblem("an older authority is still trusted (tailrace certs retire-authority)")
        if self._etcd is None:
            # Until now the cluster's has signed for etcd.
            self._etcd = _Signer(self.folder / _ETCD, self._cluster.key, self._cluster.trusted)
            for issued in self.issued():
                if issued.identity.role in MEMBERS:
                    (issued.folder / FOR_ETCD).mkdir(exist_ok=True, mode=0o700)
                    for name, mode in ((KEY, 0o600), (CERTIFICATE, 0o644)):
                        replace_file(
                            issued.folder / FOR_ETCD / name, (issued.folder / name).read_bytes(), mode
                        )
        if len(self._etcd.trusted) == 1:
            self._etcd = self._etcd.superseded(days)
        self._cluster = self._cluster.superseded(days)
        self._save()

    def retire(self) -> None:
        """Trust the signing authorities only.

        Raise AuthorityProblem while the folder holds a certificate that another authority signed; OSError.
        """
        for signer in self._signers():
            signer.require_key()
        for issued in self.issued():
            for folder, signer in self._credentials_of(issued):
                if not signer.has_signed(folder / CERTIFICATE):
                    raise AuthorityProblem(
                        f"{issued.identity} has a certificate of the older authority (tailrace certs rotate)"
                    )
        for signer in self._signers():
            del signer.trusted[1:]
        self._save()

    def _signers(self) -> list[_Signer]:
        return [self._cluster] if self._etcd is None else [self._cluster, self._etcd]

    def _signer_of(self, role: Role) -> _Signer:
        return self._etcd if self._etcd is not None and role in _ETCDS_OWN else self._cluster

    def _require_keys(self, roles: Iterable[Role]) -> None:
        """Raise AuthorityProblem unless the keys that sign for holders of these roles are there."""
        for role in roles:
            self._signer_of(role).require_key()
            if self._etcd is not None and role in MEMBERS:
                self._etcd.require_key()

    def _credentials_of(self, issued: Issued) -> Iterable[tuple[Path, _Signer]]:
        """Yield the folders of the identity's credentials, and who signs each."""
        yield issued.folder, self._signer_of(issued.identity.role)
        if self._etcd is not None and issued.identity.role in MEMBERS:
            yield issued.folder / FOR_ETCD, self._etcd

    def _folder_of(self, identity: Identity) -> Path:
        return self.folder / _ISSUED / identity.role.value / identity.name

    def _save(self) -> None:
        """Write all files, and the bundles of all credentials.

        Wherever this is interrupted, `load` finds keys that these bundles trust: they are put in place last,
        and of them the cluster's, without which there is no authority.
        """
        signers = self._signers()
        for signer in signers:
            # So that certificates without a key are known to be of no use yet, not those of a key elsewhere.
            if not signer.path.with_suffix(_KEY).exists():
                replace_file(signer.path.with_suffix(_NEW_KEY), _key_pem(signer.key), 0o600)
        for signer in signers:
            replace_file(signer.path.with_suffix(_TRUSTED), signer.bundle(), 0o644)
        for issued in self.issued():
            for folder, signer in self._credentials_of(issued):
                replace_file(folder / AUTHORITIES, signer.bundle(), 0o644)
        for signer in reversed(signers):
            key = signer.path.with_suffix(_KEY)
            if key.exists():
                replace_file(key, _key_pem(signer.key), 0o600)
            else:
                signer.path.with_suffix(_NEW_KEY).replace(key)


@dataclass(frozen=True, slots=True)
class _Signer:
    """A key that signs certificates, and the authorities to be trusted beside it."""

    # Of its files, without their endings.
    path: Path
    # None if it is kept elsewhere.
    known_key: ec.EllipticCurvePrivateKey | None = field(repr=False)
    # The first is the certificate of the key.
    trusted: list[x509.Certificate]

    @classmethod
    def create(cls, path: Path, days: float) -> _Signer:
        key, certificate = _self_signed(days)
        return cls(path, key, [certificate])

    @classmethod
    def load(cls, path: Path) -> _Signer:
        """Load the files. Raise AuthorityProblem."""
        key, trusted = _load_key(path.with_suffix(_KEY)), _load_trusted(path.with_suffix(_TRUSTED))
        if key is None:
            return cls(path, None, trusted)
        # One that precedes the key's has no key: writing it was interrupted, and it has signed nothing.
        while trusted and trusted[0].public_key() != key.public_key():
            del trusted[0]
        if not trusted:
            raise AuthorityProblem(
                f"{path.with_suffix(_KEY)}: not the key of any certificate in {path.name}{_TRUSTED}; restore "
                "both from one copy"
            )
        return cls(path, key, trusted)

    @property
    def key(self) -> ec.EllipticCurvePrivateKey:
        """Return the key. Raise AuthorityProblem if it is kept elsewhere."""
        if self.known_key is None:
            raise AuthorityProblem(
                f"{self.path.with_suffix(_KEY)} is missing: put it back to sign, or to retire an authority"
            )
        return self.known_key

    def require_key(self) -> None:
        """Raise AuthorityProblem if the key is kept elsewhere."""
        _ = self.key

    @property
    def not_after(self) -> datetime.datetime:
        return self.trusted[0].not_valid_after_utc

    def bundle(self) -> bytes:
        return b"".join(trusted.public_bytes(serialization.Encoding.PEM) for trusted in self.trusted)

    def superseded(self, days: float) -> _Signer:
        """Return one with a new key that trusts this one's authorities too."""
        key, certificate = _self_signed(days)
        return _Signer(self.path, key, [certificate, *self.trusted])

    def issue(
        self,
        folder: Path,
        identity: Identity,
        end: datetime.datetime,
        names: Sequence[x509.GeneralName],
        purposes: Sequence[x509.ObjectIdentifier],
    ) -> x509.Certificate:
        """Write a key and a certificate for it to the folder. Raise OSError."""
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = (
            x509.CertificateBuilder()
            .subject_name(_common_name(etcd_user(identity.role)))
            .issuer_name(self.trusted[0].subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(datetime.datetime.now(datetime.UTC) - _SKEW)
            .not_valid_after(min(end, self.not_after))
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key()), critical=False
            )
            .sign(self.key, hashes.SHA256())
        )
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        replace_file(folder / AUTHORITIES, self.bundle(), 0o644)
        replace_file(folder / KEY, _key_pem(key), 0o600)
        replace_file(folder / CERTIFICATE, certificate.public_bytes(serialization.Encoding.PEM), 0o644)
        return certificate

    def has_signed(self, path: Path) -> bool:
        """Return whether this key signed the certificate. Raise AuthorityProblem if it cannot be read."""
        own_key_id = x509.SubjectKeyIdentifier.from_public_key(self.key.public_key()).digest
        try:
            certificate = x509.load_pem_x509_certificate(path.read_bytes())
            by = certificate.extensions.get_extension_for_class(x509.AuthorityKeyIdentifier).value
        except (OSError, ValueError, x509.ExtensionNotFound) as error:
            raise AuthorityProblem(f"{path}: {error}") from error
        return by.key_identifier == own_key_id


def _is_unfinished(path: Path) -> bool:
    """Return whether creating this authority was interrupted; `path`: of its files, without their endings."""
    return path.with_suffix(_NEW_KEY).exists() and not path.with_suffix(_KEY).exists()


def _exists(path: Path) -> bool:
    """Return whether there is such an authority, if only its key or its certificate."""
    files = path.with_suffix(_KEY), path.with_suffix(_TRUSTED)
    return not _is_unfinished(path) and any(file.exists() for file in files)


def _load_key(path: Path) -> ec.EllipticCurvePrivateKey | None:
    """Return the key; None if there is no such file. Raise AuthorityProblem."""
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), None)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise AuthorityProblem(f"{path}: {error.strerror}") from error
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise AuthorityProblem(f"{path}: no usable key; restore a copy of it ({error})") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise AuthorityProblem(f"{path}: not an elliptic-curve key; restore a copy of it")
    return key


def _load_trusted(path: Path) -> list[x509.Certificate]:
    """Return the certificates of trusted authorities, at least one. Raise AuthorityProblem."""
    try:
        return x509.load_pem_x509_certificates(path.read_bytes())
    except FileNotFoundError as error:
        raise AuthorityProblem(f"{path} is missing: restore a copy of it") from error
    except OSError as error:
        raise AuthorityProblem(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise AuthorityProblem(f"{path}: no usable certificates; restore a copy of it ({error})") from error


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
