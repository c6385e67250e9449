"""The keeper role: delayed and timed delivery, retention, preallocation."""
