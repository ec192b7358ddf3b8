"""Answers that outlive their front end: kept here and on a second one, and resumed on any."""
