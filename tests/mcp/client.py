"""The official MCP client: calls the tool once and prints what it got, as one JSON object.

    client.py URL TOKEN ARGUMENTS [TIMEOUT_S]

Needs the package `mcp`; Open WebUI's own environment has it.
"""

import asyncio
import json
import sys

import httpx2
from mcp import Client, types
from mcp.client.streamable_http import streamable_http_client


async def main(url: str, token: str, arguments: str, timeout: str | None = None) -> None:
    headers = {"authorization": f"Bearer {token}"}
    # A call waits for a person: no limit on how long the stream may be silent.
    async with httpx2.AsyncClient(headers=headers, timeout=httpx2.Timeout(30, read=None)) as http:
        info = types.Implementation(name="python-client", version="1")
        async with Client(streamable_http_client(url, http_client=http), client_info=info) as client:
            tools = await client.list_tools()
            call = client.call_tool(tools.tools[0].name, json.loads(arguments))
            got = await asyncio.wait_for(call, float(timeout) if timeout else None)
    texts = [block.text for block in got.content]
    print(json.dumps({"tool": tools.tools[0].name, "texts": texts, "is_error": got.is_error, "details": got.structured_content}))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
