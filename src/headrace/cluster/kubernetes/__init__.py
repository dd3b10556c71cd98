"""Jobs on Kubernetes, through kubectl: `manifests` says what is made there, `pod` is what runs in it."""
