"""Whose endpoint an https address is: its certificate says, and is checked unless told not to."""

from __future__ import annotations

import ssl


def client_context(kind: type[ssl.SSLContext], *, insecure: bool) -> ssl.SSLContext:
    """
    Return a TLS context of *kind* that checks certificate and host name, unless *insecure*.

    Args:
        kind: the standard library's, or gevent's.
        insecure: take any certificate.

    The authorities are the system's; `SSL_CERT_FILE` names another file of them (OpenSSL's own
    variable).
    """
    context = kind(ssl.PROTOCOL_TLS_CLIENT)
    if insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    else:
        context.load_default_certs()
    return context
