"""Producers of business topics: a pool of them, and the rules that decide what is stored."""
