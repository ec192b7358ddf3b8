"""Tests of tailrace.fleet."""
