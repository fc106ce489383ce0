"""Scripts for harnesses: generated agents (`generators`), recorded sessions (`sessions`), request traces (`traces`), and the
mixes and arrivals they come in (`mixes`). Everything is drawn from seeds that do not depend on time or on answers."""
