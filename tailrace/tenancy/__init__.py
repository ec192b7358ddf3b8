"""Clients: API keys, the tenants behind them, and what each may take."""
