"""What agents, notebook servers, hub and service say to each other over sockets: frames, texts, requests."""
