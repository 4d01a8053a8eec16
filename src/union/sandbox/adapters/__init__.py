"""Adapters for agent frameworks, one module each, and an MCP server.

A module imports its framework, so import the module of the framework in use, such as
``union.sandbox.adapters.pydantic_ai``. Nothing else in the package imports an adapter.
"""

__all__: list[str] = []
