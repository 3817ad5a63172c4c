"""`with` and `async with` for whatever has `close()`."""

import asyncio
from types import TracebackType
from typing import Self


class Closing:
    """Closed at the end of a `with` block; in asyncio by another thread, because closing may wait."""

    def close(self) -> None:
        """Release everything; closing twice is fine."""
        raise NotImplementedError

    async def aclose(self) -> None:
        """`close` for asyncio: in another thread, so that the loop goes on."""
        await asyncio.to_thread(self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()
