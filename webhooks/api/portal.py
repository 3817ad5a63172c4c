"""The portal: a page for people at `/`, and the API's reference at `/docs`.

Both are static and ask the API with the visitor's token, which they keep for the browser's session.
"""

from importlib.resources import files

from starlette.responses import Response

# Everything comes from this server: no foreign scripts, styles, fonts or images.
_POLICY = (
    "default-src 'none'; script-src 'self' 'unsafe-inline'; style-src 'self' 'unsafe-inline'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'"
)


def page(name: str = "portal.html") -> Response:
    """The page itself; it contains nothing of any tenant. It may be embedded in a page of the application."""
    body = files("brokerless.webhooks.api").joinpath(name).read_bytes()
    headers = {
        "Content-Security-Policy": _POLICY,
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
        "Cache-Control": "no-store",
    }
    return Response(body, headers=headers, media_type="text/html; charset=utf-8")
