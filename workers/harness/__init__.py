"""What an agent harness imports to send branch signals, and the replay of recorded sessions."""
