"""What any operator needs: API client, login, leader election, work queue, event poster. Knows no DDPJob."""
