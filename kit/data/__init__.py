"""Prepare, export and inspect training data: conversations to packed rows."""
