"""Programs that know nothing of headrace: preloaded (`headrace run`) or over a mount."""
