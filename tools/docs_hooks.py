"""What MkDocs calls while it builds the site: the command line's reference is made from the commands themselves."""

from typing import Any


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Put the reference of every command in the place of `<!-- commands -->`."""
    if "<!-- commands -->" not in markdown:
        return markdown
    from brokerless.cli.main import app

    text = app.generate_docs(include_hidden=False, heading_level=3)
    return markdown.replace("<!-- commands -->", text)
