#define _GNU_SOURCE
#include "platform/frames.h"

#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

struct frame_socket frame_socket_agent = FRAME_SOCKET_CLOSED;

bool frame_socket_connect(struct frame_socket *connection, const char *path) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    size_t length = strlen(path);
    if (length >= sizeof address.sun_path) {
        static _Atomic bool logged;
        if (!logged)
            log_line(LOG_ERROR, "GPUSHARE_SOCKET has %d bytes; the path of a socket can have at most %d", (int)length,
                     (int)sizeof address.sun_path - 1);
        logged = true;
        return false;
    }
    memcpy(address.sun_path, path, length + 1);
    int opened = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (opened < 0) return false;
    if (connect(opened, (struct sockaddr *)&address, sizeof address) != 0) {
        close(opened);
        return false;
    }
    *connection = (struct frame_socket){.file = opened};
    return true;
}

void frame_socket_close(struct frame_socket *connection) {
    if (connection->file >= 0) close(connection->file);
    connection->file = -1;
}

bool frame_socket_send(struct frame_socket *connection, struct frame *frame) {
    if (connection->file < 0) return false;
    frame->magic = FRAME_MAGIC;
    frame->version = FRAME_VERSION;
    frame->serial = ++connection->serial;
    ssize_t sent;
    do sent = send(connection->file, frame, sizeof *frame, MSG_NOSIGNAL | MSG_DONTWAIT);
    while (sent < 0 && errno == EINTR);
    if (sent == (ssize_t)sizeof *frame) return true;
    log_line(LOG_INFO, "the agent does not take frames (%s)", sent < 0 ? strerror(errno) : "cut short");
    frame_socket_close(connection);
    return false;
}

int frame_socket_receive(struct frame_socket *connection, struct frame *frame) {
    if (connection->file < 0) return -1;
    ssize_t received;
    /* MSG_TRUNC: recv returns the packet's real length, even if it is longer */
    do received = recv(connection->file, frame, sizeof *frame, MSG_DONTWAIT | MSG_TRUNC);
    while (received < 0 && errno == EINTR);
    if (received < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return 0;
    if (received == (ssize_t)sizeof *frame && frame->magic == FRAME_MAGIC && frame->version == FRAME_VERSION) return 1;
    if (received > 0) log_line(LOG_ERROR, "the agent sent a message that is no frame of version %d", FRAME_VERSION);
    return -1;
}

RESET_IN_CHILD(frames_reset);
void frames_reset(void) {
    frame_socket_close(&frame_socket_agent); /* the parent's connection stays open in the parent */
}
