"""Random programs of consumers and faults, checked against a model of valid deliveries."""
