"""An asynchronous client with the methods of the other, so that one test runs against both."""

import asyncio

from moeserve.proto.client import AsyncMoeClient


class Waited:
    """An AsyncMoeClient that is waited for, so that every test runs against both clients."""

    def __init__(self, *arguments, **options) -> None:
        self._runner = asyncio.Runner()

        async def make() -> AsyncMoeClient:
            return AsyncMoeClient(*arguments, **options)

        self._client = self._runner.run(make())

    def __getattr__(self, name: str):
        async def run(*arguments, **options):
            return await getattr(self._client, name)(*arguments, **options)

        return lambda *arguments, **options: self._runner.run(run(*arguments, **options))

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        self.close()
        self._runner.close()
