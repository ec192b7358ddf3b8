"""Explain a failed TLS handshake in one line that an operator can act on."""

from __future__ import annotations

import ssl
from typing import Final

# OpenSSL's X509_V_ERR_*, which the `ssl` module gives as `verify_code`.
_NOT_YET_VALID: Final = 9
_EXPIRED: Final = 10
_HOSTNAME: Final = 62
_UNTRUSTED: Final = frozenset({2, 18, 19, 20, 21, 24, 30})
_PURPOSE: Final = 26

# TLS alerts that the peer sent.
_ALERTS: Final = {
    "CERTIFICATE_EXPIRED": "the peer reports that our certificate has expired",
    "UNKNOWN_CA": "the peer does not trust the authority that signed our certificate",
    "CERTIFICATE_REQUIRED": "the peer requires a certificate and got none",
    "BAD_CERTIFICATE": "the peer reports that it cannot use our certificate",
    "UNSUPPORTED_CERTIFICATE": "the peer reports that our certificate is for another purpose",
    "ACCESS_DENIED": "the peer reports that our certificate does not permit this",
}
_PLAIN: Final = frozenset(
    {"WRONG_VERSION_NUMBER", "HTTP_REQUEST", "HTTPS_PROXY_REQUEST", "RECORD_LAYER_FAILURE"}
)


def refusal(error: ssl.SSLError) -> str:
    """Return what was wrong with the certificate, and whose it is, or what was wrong with the connection."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return _verification(error)
    reason = error.reason or ""
    for alert, line in _ALERTS.items():
        if reason.endswith(f"ALERT_{alert}"):
            return line
    if reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return "the peer has no certificate"
    if reason in _PLAIN:
        return "the peer does not speak TLS"
    return f"TLS failed: {reason.lower().replace('_', ' ') or error}"


def _verification(error: ssl.SSLCertVerificationError) -> str:
    match error.verify_code:
        case code if code == _EXPIRED:
            return "the certificate has expired"
        case code if code == _NOT_YET_VALID:
            return "the certificate is not valid yet: check the clocks"
        case code if code == _HOSTNAME:
            return f"the certificate has another role: {error.verify_message}"
        case code if code == _PURPOSE:
            return "the certificate is for another purpose (an operator's cannot serve)"
        case code if code in _UNTRUSTED:
            return f"the certificate is not signed by an authority trusted here ({error.verify_message})"
        case _:
            return f"the certificate was rejected: {error.verify_message}"
