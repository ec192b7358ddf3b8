"""The console: a page that shows the fleet through the admin API."""
