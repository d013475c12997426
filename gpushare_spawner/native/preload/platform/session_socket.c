#include "platform/session_socket.h"

#include "platform/frame_socket.h"

static struct frame_socket agent = FRAME_SOCKET_CLOSED;

int session_socket_file(void) {
    return agent.file;
}

bool session_socket_connect(const char *path) {
    return frame_socket_connect(&agent, path);
}

bool session_socket_send(struct frame *frame) {
    return frame_socket_send(&agent, frame);
}

int session_socket_receive(struct frame *frame) {
    return frame_socket_receive(&agent, frame);
}

void session_socket_close(void) {
    frame_socket_close(&agent);
}
