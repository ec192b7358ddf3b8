"""Tests of tailrace.control."""
