"""What proposes tokens, and what decides when to stop proposing."""
