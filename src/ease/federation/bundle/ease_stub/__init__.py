"""What Flower runs: two ends that pass bytes on, and read nothing of them."""
