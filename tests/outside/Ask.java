// Java's own HTTP client, which offers HTTP/2 in clear text with its first request, against a running server: java tests/outside/Ask.java
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest.BodyPublishers;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse.BodyHandlers;

class Ask {
    public static void main(String[] arguments) throws Exception {
        var address = URI.create(System.getenv("UNBIND_URL") + "/v1/completions");
        for (var stream : new String[] {"false", "true"}) {
            var body = "{\"prompt\": \"def add(\", \"max_tokens\": 4, \"temperature\": 0, \"stream\": " + stream + "}";
            var asked = HttpRequest.newBuilder(address).header("Content-Type", "application/json").POST(BodyPublishers.ofString(body));
            var answer = HttpClient.newHttpClient().send(asked.build(), BodyHandlers.ofString());
            if (answer.statusCode() != 200 || !answer.body().contains("finish_reason\":\"length")) {
                throw new AssertionError(answer.statusCode() + " " + answer.body());
            }
            System.out.println("ok, stream " + stream);
        }
    }
}
