"""TLS context of the client, which checks certificate and host name."""

from __future__ import annotations

import ssl


def client_context(kind: type[ssl.SSLContext], *, insecure: bool) -> ssl.SSLContext:
    """
    Return a TLS context of *kind* that checks certificate and host name, unless *insecure*.

    Args:
        kind: the standard library's class, or gevent's.
        insecure: whether any certificate is accepted.

    The trusted authorities are the system's; OpenSSL's variable `SSL_CERT_FILE` names another file.
    """
    context = kind(ssl.PROTOCOL_TLS_CLIENT)
    if insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    else:
        context.load_default_certs()
    return context
