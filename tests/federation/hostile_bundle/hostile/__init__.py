"""An app that means harm: it tries to reach the photographs beside which a Flower node runs it."""
