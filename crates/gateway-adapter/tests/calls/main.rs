//! The endpoint for asking tools, on a real nats-server with a real router. There is no Gateway
//! here: calls come over HTTP, as its plugin and MCP clients send them.

mod bench;
mod mcp;
mod mcp_python;
mod plugin;
