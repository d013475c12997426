"""Which tier an idle session should be in. Pure policy: time comes in as an argument."""
