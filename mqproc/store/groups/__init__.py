"""Consumer groups as the store keeps them: progress and settings."""
