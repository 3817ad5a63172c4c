"""The portal: a page for people at `/`, and the API's reference at `/docs`.

Both are static and ask the API with the visitor's token, which they keep for the browser's session.
"""

import re
from collections.abc import Sequence
from importlib.resources import files

from starlette.responses import Response

from brokerless.core.errors import ConfigError

# Everything comes from this server: no foreign scripts, styles, fonts or images.
_POLICY = (
    "default-src 'none'; script-src 'self' 'unsafe-inline'; style-src 'self' 'unsafe-inline'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'self'"
)
_ORIGIN = re.compile(r"\*|https?://(\*\.)?[A-Za-z0-9.-]+(:([0-9]{1,5}|\*))?")


class Pages:
    """The pages and their headers; `embed_in` are origins that may show them in a frame."""

    def __init__(self, embed_in: Sequence[str] = ()) -> None:
        for origin in embed_in:
            if not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    "embed_in", f"{origin!r}: must be an origin such as https://app.example.com"
                )
        self._headers = {
            "Content-Security-Policy": " ".join([_POLICY, *embed_in]),
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
            "Cache-Control": "no-store",
        }

    def answer(self, name: str) -> Response:
        """One page; it contains nothing of any tenant."""
        body = files("brokerless.webhooks.api").joinpath(name).read_bytes()
        return Response(body, headers=self._headers, media_type="text/html; charset=utf-8")
