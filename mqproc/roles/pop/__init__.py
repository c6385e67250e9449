"""Pop consumption: receive, acknowledge, redelivery after the invisible time."""
