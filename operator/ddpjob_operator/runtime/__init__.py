"""What any operator needs: API client, login, leader election, work queue, event recorder. Knows no DDPJob."""
