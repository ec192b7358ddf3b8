"""Reports as single HTML files, without scripts and external resources."""
